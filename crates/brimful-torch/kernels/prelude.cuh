// Shared by all kernels: 16-byte loads, numbers packed into words, sums over a warp, and a grid barrier. NVRTC
// gets no include folder: build.rs inlines this into each kernel.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__
#define SHARED_WORDS(name) extern __shared__ uint4 name[]
#define ALL_LANES 0xffffffffu

// Loads a word that is read only once, without caching it in L1.
DEVICE uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Loads a number that another block of the same launch has written.
DEVICE float load_shared_by_blocks(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}

// Dtypes: conversion of one number, or of two in 32 bits, to f32 and back.
struct Bf16 {
  typedef u16 Number;
  static DEVICE float widen(u16 v) { return __uint_as_float(static_cast<u32>(v) << 16); }
  static DEVICE u16 narrow(float v) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
  }
  static DEVICE u32 narrow_two(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
};

struct F16 {
  typedef u16 Number;
  static DEVICE float widen(u16 v) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
    return r;
  }
  static DEVICE u16 narrow(float v) {
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
  }
  static DEVICE u32 narrow_two(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
};

struct F32 {
  typedef float Number;
  static DEVICE float widen(float v) { return v; }
  static DEVICE float narrow(float v) { return v; }
};

// Unit of a thread's loads: N numbers in 16 bytes, or a single one.
template <class Kind, int N>
struct Packed;

template <class Kind>
struct Packed<Kind, 1> {
  typedef typename Kind::Number Word;
  static DEVICE Word load(const Word* p) { return *p; }
  static DEVICE void unpack(const Word& word, float* out) { out[0] = Kind::widen(word); }
  static DEVICE Word pack(const float* in) { return Kind::narrow(in[0]); }
};

template <class Kind>
struct Packed<Kind, 8> {
  typedef uint4 Word;
  static DEVICE Word load(const Word* p) { return load_once(p); }
  static DEVICE void two(u32 bits, float* out) {
    out[0] = Kind::widen(static_cast<u16>(bits));
    out[1] = Kind::widen(static_cast<u16>(bits >> 16));
  }
  static DEVICE void unpack(const Word& word, float* out) {
    two(word.x, out);
    two(word.y, out + 2);
    two(word.z, out + 4);
    two(word.w, out + 6);
  }
  static DEVICE Word pack(const float* in) {
    return make_uint4(Kind::narrow_two(in[0], in[1]), Kind::narrow_two(in[2], in[3]),
                      Kind::narrow_two(in[4], in[5]), Kind::narrow_two(in[6], in[7]));
  }
};

template <>
struct Packed<F32, 4> {
  typedef uint4 Word;
  static DEVICE Word load(const Word* p) { return load_once(p); }
  static DEVICE void unpack(const Word& word, float* out) {
    out[0] = __uint_as_float(word.x);
    out[1] = __uint_as_float(word.y);
    out[2] = __uint_as_float(word.z);
    out[3] = __uint_as_float(word.w);
  }
  static DEVICE Word pack(const float* in) {
    return make_uint4(__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]),
                      __float_as_uint(in[3]));
  }
};

// Access to a single number whose dtype is known only at run time: a weight, or a running statistic.
enum NumberKind { kF32 = 0, kBf16 = 1, kF16 = 2 };

DEVICE float load_number(const void* p, u32 i, int kind) {
  if (kind == kF32) return static_cast<const float*>(p)[i];
  const u16 v = static_cast<const u16*>(p)[i];
  return kind == kBf16 ? Bf16::widen(v) : F16::widen(v);
}

DEVICE void store_number(void* p, u32 i, int kind, float v) {
  if (kind == kF32) {
    static_cast<float*>(p)[i] = v;
  } else {
    static_cast<u16*>(p)[i] = kind == kBf16 ? Bf16::narrow(v) : F16::narrow(v);
  }
}

DEVICE float from_lane(float v, int across) { return __shfl_xor_sync(ALL_LANES, v, across); }

// Returns the sum over a warp, in every lane, always in the same order.
DEVICE float warp_sum(float v) {
  for (int across = 16; across > 0; across >>= 1) v += from_lane(v, across);
  return v;
}

// Waits until all blocks of a cooperative launch have arrived; their earlier writes are visible afterwards.
//
// The driver gives each such launch a counter of its own, and its address in two registers. The arrivals of one
// barrier add up to 2^31 and so flip the counter's top bit once.
DEVICE void grid_barrier() {
  __syncthreads();
  if (threadIdx.x == 0) {
    u32* workspace;
    asm("mov.b64 %0, {%%envreg2, %%envreg1};" : "=l"(workspace));
    u32* arrived = workspace + 1;
    const u32 others = gridDim.x * gridDim.y - 1;
    const bool first = blockIdx.x == 0 && blockIdx.y == 0;
    u32 before, now;
    __threadfence();
    asm volatile("atom.add.release.gpu.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(arrived), "r"(first ? 0x80000000u - others : 1u)
                 : "memory");
    do {
      asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
    } while (((before ^ now) & 0x80000000u) == 0);
    __threadfence();
  }
  __syncthreads();
}
