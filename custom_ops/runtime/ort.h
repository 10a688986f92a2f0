// Thin ownership and error handling over the C interface: a failed call becomes an exception, an
// exception a status, and what was acquired is released.
#ifndef MOONPOLY_ORT_H_
#define MOONPOLY_ORT_H_

#include <new>
#include <string>

#include "error.h"
#include "moonpoly.h"
#include "ort_abi.h"
#include "shape.h"

namespace moonpoly {

// A status of ONNX Runtime itself on its way back to it.
struct OrtFailure {
  OrtStatus* status;
};

class Ort {
 public:
  // `version`: what the runtime says of itself ("1.24.1"), whose second number is its API's.
  Ort(const OrtApi* api, const char* version);
  const OrtApi* operator->() const { return api_; }
  const OrtApi* api() const { return api_; }

  // Throws if the call failed.
  void operator()(OrtStatus* status) const {
    if (status) throw OrtFailure{status};
  }
  float attribute(const OrtKernelInfo* info, const char* name, float otherwise) const {
    return found(api_->KernelInfoGetAttribute_float(info, name, &otherwise)), otherwise;
  }
  int64_t attribute(const OrtKernelInfo* info, const char* name, int64_t otherwise) const {
    return found(api_->KernelInfoGetAttribute_int64(info, name, &otherwise)), otherwise;
  }
  // A tensor's shape and where it lies; false, with the rank alone, beyond kMaxRank dimensions.
  bool tensor(const OrtValue* value, Shape* shape, void** data) const;
  // A string, "" if the node has no such attribute.
  std::string text_attribute(const OrtKernelInfo* info, const char* name) const;
  // How many values a list has, 0 if the node has no such attribute; at most `room` are stored.
  int list_attribute(const OrtKernelInfo* info, const char* name, int64_t* out, int room) const;
  std::string node_name(const OrtKernelInfo* info) const;
  // Through the session's logger; silent if it has none.
  void warn(const OrtKernelInfo* info, const std::string& text) const;

 private:
  // Of at most kMaxRank dimensions; beyond them the rank alone.
  void copy_shape(const OrtValue* value, Shape* shape, size_t* rank) const;
  // A missing attribute is a status to release, and leaves the default.
  void found(OrtStatus* status) const {
    if (status) api_->ReleaseStatus(status);
  }
  const OrtApi* api_;
  bool lends_shapes_;
};

// The allocator of the device that a kernel was created for.
class KernelAllocator {
 public:
  KernelAllocator(const Ort& ort, const OrtKernelInfo* info) : ort_(ort) {
    ort(ort->KernelInfoGetAllocator(info, OrtMemTypeDefault, &allocator_));
    if (OrtStatus* status = ort->AllocatorGetInfo(allocator_, &memory_)) {
      ort->ReleaseAllocator(allocator_);
      ort(status);
    }
  }
  ~KernelAllocator() { ort_->ReleaseAllocator(allocator_); }
  KernelAllocator(const KernelAllocator&) = delete;
  KernelAllocator& operator=(const KernelAllocator&) = delete;
  OrtAllocator* get() const { return allocator_; }
  const OrtMemoryInfo* memory() const { return memory_; }

 private:
  const Ort ort_;
  OrtAllocator* allocator_ = nullptr;
  const OrtMemoryInfo* memory_ = nullptr;
};

// Device memory for one run. KernelContext_GetScratchBuffer tags it with the run's stream, which
// plain AllocatorAlloc does not: the arena then reuses it on that stream only until the run has
// ended, so that it is freed as soon as the work is queued.
class Scratch {
 public:
  Scratch(const Ort& ort, const OrtKernelContext* context, const KernelAllocator& allocator,
          int64_t bytes)
      : ort_(ort), allocator_(allocator) {
    if (bytes == 0) return;
    ort(ort->KernelContext_GetScratchBuffer(context, allocator.memory(), static_cast<size_t>(bytes),
                                            &data_));
    if (!data_) fail(MP_CUDA, "ONNX Runtime has no ", bytes, " bytes of scratch memory left");
  }
  ~Scratch() {
    if (!data_) return;
    if (OrtStatus* status = ort_->AllocatorFree(allocator_.get(), data_)) {
      ort_->ReleaseStatus(status);
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data() const { return data_; }

 private:
  const Ort& ort_;
  const KernelAllocator& allocator_;
  void* data_ = nullptr;
};

// Runs `body`; what it throws becomes a status.
template <typename Body>
OrtStatus* guarded(const OrtApi* api, Body body) {
  try {
    body();
    return nullptr;
  } catch (const OrtFailure& failure) {
    return failure.status;
  } catch (const Error& e) {
    const OrtErrorCode code = e.status == MP_INVALID ? ORT_INVALID_ARGUMENT
                              : e.status == MP_CUDA || e.status == MP_NO_DRIVER ? ORT_EP_FAIL
                                                                                : ORT_FAIL;
    return api->CreateStatus(code, (std::string("MoonPoly: ") + e.what()).c_str());
  } catch (const std::bad_alloc&) {
    return api->CreateStatus(ORT_FAIL, "MoonPoly: out of host memory");
  } catch (const std::exception& e) {
    return api->CreateStatus(ORT_FAIL, (std::string("MoonPoly: ") + e.what()).c_str());
  }
}

}  // namespace moonpoly
#endif  // MOONPOLY_ORT_H_
