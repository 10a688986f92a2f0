// The functions that the interpreter backend's CPU ops call; set from Python through
// mp_set_interpreter and mp_set_conv_interpreter.
#ifndef MOONPOLY_INTERPRETER_H_
#define MOONPOLY_INTERPRETER_H_

#include <atomic>

#include "moonpoly.h"

namespace moonpoly {

inline std::atomic<mp_interpret_fn>& interpreter() {
  static std::atomic<mp_interpret_fn> fn{nullptr};
  return fn;
}

inline std::atomic<mp_interpret_conv_fn>& conv_interpreter() {
  static std::atomic<mp_interpret_conv_fn> fn{nullptr};
  return fn;
}

}  // namespace moonpoly
#endif  // MOONPOLY_INTERPRETER_H_
