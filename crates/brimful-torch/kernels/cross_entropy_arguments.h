// Arguments of kernels/cross_entropy.cu, shared with the C++ code that launches it.
#pragma once

struct CrossEntropyArguments {
  void* logits;                  // rows × step numbers; rows begin at multiples of 16 bytes
  const long long* index;        // a class for every row
  const unsigned char* counted;  // false for ignored rows
  const float* of_target;        // factor of the target's log probability, per row
  const float* of_all;           // factor of all classes' log probabilities, per row; null without smoothing
  const float* class_weights;    // null if all are one
  const float* total;            // sum of the class weights; null without smoothing
  float* losses;                 // one for every row
  long long step;                // numbers between the starts of two rows
  int classes;
  int gradient;                  // nonzero to overwrite the logits with their gradient
};
