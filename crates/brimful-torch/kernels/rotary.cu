// Rotary position embedding: rotates each pair of numbers of a head, one of its first half and one of its second,
// by an angle that depends on the position in the sequence. A thread handles one word of each half:
//
//   x [row, head, first half | second half] ─┬─▶ first·cos − second·sin | second·cos + first·sin ─▶ out
//   cos, sin [row mod sequence, half] ───────┘
//
// The backward is the same with the angle's sign flipped.

#include "prelude.cuh"
#include "rotary_arguments.h"

// Defined outside: KIND and PER_WORD (numbers a word).
typedef Packed<KIND, PER_WORD> Words;
typedef Words::Word Word;

KERNEL void __launch_bounds__(256) rotary(const RotaryArguments a) {
  const long long pair = blockIdx.x * 256LL + threadIdx.x;
  if (pair >= a.total) return;
  const int words = a.half / PER_WORD;
  const int column = static_cast<int>(pair % words);
  const long long head = pair / words;
  const int place = static_cast<int>(head / a.heads % a.sequence);
  const Word* x = static_cast<const Word*>(a.x) + head * 2 * words + column;
  Word* out = static_cast<Word*>(a.out) + head * 2 * words + column;
  float first[PER_WORD], second[PER_WORD];
  Words::unpack(Words::load(x), first);
  Words::unpack(Words::load(x + words), second);
  const long long at = static_cast<long long>(place) * a.half + column * PER_WORD;
#pragma unroll
  for (int k = 0; k < PER_WORD; ++k) {
    const float c = a.cos[at + k], s = a.sign * a.sin[at + k];
    const float turned = first[k] * c - second[k] * s;
    second[k] = second[k] * c + first[k] * s;
    first[k] = turned;
  }
  *out = Words::pack(first);
  out[words] = Words::pack(second);
}
