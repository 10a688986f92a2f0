// The one exception type of the runtime. It is thrown anywhere below the C and ONNX Runtime
// surfaces and turned into a status there; it never crosses either.
#ifndef MOONPOLY_ERROR_H_
#define MOONPOLY_ERROR_H_

#include <sstream>
#include <stdexcept>
#include <string>

#include "moonpoly.h"

namespace moonpoly {

class Error : public std::runtime_error {
 public:
  Error(mp_status status, const std::string& text) : std::runtime_error(text), status(status) {}
  const mp_status status;
};

// Joins its arguments with operator<<: fail(MP_INVALID, "K is ", k, "; ...").
template <typename... Parts>
[[noreturn]] void fail(mp_status status, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(status, text.str());
}

}  // namespace moonpoly
#endif  // MOONPOLY_ERROR_H_
