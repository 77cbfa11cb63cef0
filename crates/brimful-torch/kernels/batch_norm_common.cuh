// Shared by the forward and the backward of BatchNorm: mapping of threads to rows and channels, and sums over the
// rows of a block.
//
//            channels (LANES vectors of WIDTH numbers: a slice)
//            lane 0   lane 1   …           block (slice, chunk) has THREADS/LANES rows a step,
//   row 0   [thread 0][thread 1] …         and its chunk of rows in as many steps as that takes
//   row 1   [thread L][ …                  16 bytes a thread if the channels divide evenly, else one number
//
// Defined at compile time: KIND, WIDTH, LANES, THREADS, PASS.
#pragma once
#include "prelude.cuh"
#include "batch_norm_arguments.h"

// Part of the work that a launch does. WHOLE: both parts, with a barrier of all blocks between.
#define FIRST_HALF 1
#define SECOND_HALF 2
#define WHOLE 3
// Statistics only: all of it, or the part after the barrier.
#define STATISTICS 4
#define FINISH 5
// Statistics are given.
#define FIXED 6
// Mean and variance of each channel only: all of it, or the part after the barrier.
#define MOMENTS 7
#define FINISH_MOMENTS 8

typedef Packed<KIND, WIDTH> Pack;
typedef Pack::Word Word;

enum {
  kRowsAStep = THREADS / LANES,
  kChannels = LANES * WIDTH,  // of a slice
  kWarps = THREADS / 32,
  kGroups = THREADS / kChannels  // groups of threads that combine partials side by side
};

// Position of a thread.
struct Place {
  int slice, block, blocks;
  int lane, row;
  u32 vectors;  // per row
  u32 vector;   // of the thread
  bool inside;
  int first, last;  // rows of the block
  int steps;
};

DEVICE int rows_of(int block, int chunk, int rows) {
  const int left = rows - block * chunk;
  return left < 0 ? 0 : left < chunk ? left : chunk;
}

template <class Arguments>
DEVICE Place place(const Arguments& a) {
  Place p;
  p.slice = blockIdx.x;
  p.block = blockIdx.y;
  p.blocks = a.blocks;
  p.lane = threadIdx.x % LANES;
  p.row = threadIdx.x / LANES;
  p.vectors = a.channels / WIDTH;
  p.vector = p.slice * LANES + p.lane;
  p.inside = p.vector < p.vectors;
  const int own = rows_of(p.block, a.chunk, a.rows);
  p.first = p.block * a.chunk;
  p.last = p.first + own;
  p.steps = (own + kRowsAStep - 1) / kRowsAStep;
  return p;
}

DEVICE int row_at(const Place& p, int step) { return p.first + step * kRowsAStep + p.row; }
DEVICE bool has(const Place& p, int row) { return p.inside && row < p.last; }
DEVICE u32 index_of(const Place& p, int row) { return static_cast<u32>(row) * p.vectors + p.vector; }

// Copies the thread's channels out of a slice's array.
DEVICE void own_channels(const Place& p, const float* of_slice, float* out) {
#pragma unroll
  for (int j = 0; j < WIDTH; j++) out[j] = of_slice[p.lane * WIDTH + j];
}

// Copies the thread's channels out of an array of all channels.
DEVICE void own_of_all(const Place& p, const float* of_all, float* out) {
#pragma unroll
  for (int j = 0; j < WIDTH; j++) out[j] = p.inside ? of_all[p.vector * WIDTH + j] : 0.f;
}

// Returns the offset of a block's partials, with `kinds` numbers per channel.
DEVICE u64 partials_at(const Place& p, int block, int kinds) {
  return (static_cast<u64>(p.slice) * p.blocks + block) * kinds * kChannels;
}

// Returns the address of a vector that a block keeps between the two parts: all slots of one tensor, then those of
// the next.
DEVICE Word* slot_of(Word* kept, int slots, int tensor, int step) {
  return kept + (static_cast<u64>(tensor) * slots + step) * THREADS + threadIdx.x;
}
