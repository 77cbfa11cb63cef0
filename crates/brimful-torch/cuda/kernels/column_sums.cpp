// Launches kernels/column_partials.cu and kernels/column_sums.cu.

#include "functions.h"

#include "ahead.h"
#include "kernel_family.h"
#include "kernel_sources.h"
#include "strips.h"

#include <algorithm>

namespace brimful::kernels {

namespace {

constexpr int kColumnsABlock = 32;
constexpr int kColumnThreads = 512;

const KernelFamily<2> partials_family(
    column_partials_source, {Define{"KIND", kNumberKinds}, Define{"PER_WORD"}});
const Kernel sums_kernel(column_sums_source, "column_sums", {});
const Kernel adding_kernel(column_sums_source, "add_column_sums", {});

}  // namespace

Compiling column_partials_compiling(NumberKind kind) {
  return partials_family.compiling({kind, numbers_a_word(kind)});
}

int64_t column_partial_rows(int64_t rows, int64_t columns, NumberKind kind) {
  return Strips(kind, columns).row_blocks(rows);
}

void column_partials(const ColumnPartialsArguments& given, NumberKind kind) {
  const Strips strips(kind, given.columns);
  ColumnPartialsArguments arguments = given;
  arguments.rows_of_block = strips.rows_of_block(given.rows);
  partials_family.of("column_partials", {kind, strips.per_word})
      .launch(strips.shape(given.rows), arguments);
}

void column_sums(const ColumnSumsArguments& arguments) {
  const auto blocks = (arguments.columns + kColumnsABlock - 1) / kColumnsABlock;
  const unsigned tables = arguments.into[1] == nullptr ? 1 : 2;
  if (blocks == 0) return;
  sums_kernel.launch(
      Shape{static_cast<unsigned>(blocks), tables, kColumnThreads, 0, false}, arguments);
}

void add_column_sums(const AddColumnSumsArguments& arguments, int tables) {
  const int widest = *std::max_element(arguments.columns, arguments.columns + tables);
  const auto blocks = static_cast<unsigned>((widest + kColumnsABlock - 1) / kColumnsABlock);
  const Shape shape{blocks, static_cast<unsigned>(tables), kColumnThreads, 0, false};
  adding_kernel.launch(shape, arguments);
}

}  // namespace brimful::kernels
