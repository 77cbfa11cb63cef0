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

using PartialsFamily = KernelFamily<2>;

const PartialsFamily& partials_family() {
  static const PartialsFamily family(
      column_partials_source, "column_partials", {Define{"KIND", kNumberKinds}, Define{"PER_WORD"}});
  return family;
}

}  // namespace

Compiling column_partials_compiling(NumberKind kind) {
  const int per_word = static_cast<int>(numbers_a_word(kind));
  return partials_family().compiling({static_cast<int>(kind), per_word});
}

int64_t column_partial_rows(int64_t rows, int64_t columns, NumberKind kind) {
  return Strips(kind, columns).row_blocks(rows);
}

void column_partials(const ColumnPartialsArguments& given, NumberKind kind) {
  const Strips strips(kind, given.columns);
  ColumnPartialsArguments arguments = given;
  arguments.rows_of_block = strips.rows_of_block(given.rows);
  const PartialsFamily::Numbers numbers{static_cast<int>(kind), static_cast<int>(strips.per_word)};
  partials_family().of(numbers).launch(strips.shape(given.rows), arguments);
}

void column_sums(const ColumnSumsArguments& arguments) {
  static const Kernel kernel(column_sums_source, "column_sums", {});
  const auto blocks = (arguments.columns + kColumnsABlock - 1) / kColumnsABlock;
  const unsigned tables = arguments.into[1] == nullptr ? 1 : 2;
  if (blocks == 0) return;
  kernel.launch(Shape{static_cast<unsigned>(blocks), tables, kColumnThreads, 0, false}, arguments);
}

void add_column_sums(const AddColumnSumsArguments& arguments, int tables) {
  static const Kernel kernel(column_sums_source, "add_column_sums", {});
  const int widest = *std::max_element(arguments.columns, arguments.columns + tables);
  const auto blocks = static_cast<unsigned>((widest + kColumnsABlock - 1) / kColumnsABlock);
  const Shape shape{blocks, static_cast<unsigned>(tables), kColumnThreads, 0, false};
  kernel.launch(shape, arguments);
}

}  // namespace brimful::kernels
