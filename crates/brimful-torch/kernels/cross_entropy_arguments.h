// What kernels/cross_entropy.cu is told, as both sides see it.
#pragma once

struct CrossEntropyArguments {
  void* logits;                  // rows × step numbers, which begin at multiples of 16 bytes
  const long long* index;        // a class for every row
  const unsigned char* counted;  // whether a row is not ignored
  const float* of_target;        // what the target's logarithm counts for, a row
  const float* of_all;           // what all classes' count for, a row; null without smoothing
  const float* class_weights;    // null where all are one
  const float* total;            // their sum; null without smoothing
  float* losses;                 // one for every row
  long long step;                // numbers from one row to the next
  int classes;
  int gradient;                  // whether the gradient is to be left in the logits' place
};
