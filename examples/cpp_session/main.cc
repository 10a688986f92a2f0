// Runs a rewritten model from C++ on MoonPoly's kernels; no Python at run time.
//
//   main rewritten.onnx /path/to/libmoonpoly_ort.so rows
//
// The model (from `moonpoly rewrite`) must have one float input of two dimensions, the first of
// them dynamic. README.md beside this file tells how to build it.
#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: main rewritten.onnx libmoonpoly_ort.so rows\n";
    return 2;
  }
  try {
    Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "example");
    Ort::SessionOptions options;
    OrtCUDAProviderOptions cuda{};
    options.AppendExecutionProvider_CUDA(cuda);
    // Read by the library when it is registered, so they come first. All are optional: by default
    // the kernel pack is looked for beside the library and in the cache.
    options.AddConfigEntry("moonpoly.precision", "tf32");
    options.RegisterCustomOpsLibrary(argv[2]);
    Ort::Session session(env, argv[1], options);

    Ort::AllocatorWithDefaultOptions allocator;
    auto input_name = session.GetInputNameAllocated(0, allocator);
    auto output_name = session.GetOutputNameAllocated(0, allocator);
    auto shape = session.GetInputTypeInfo(0).GetTensorTypeAndShapeInfo().GetShape();
    if (shape.size() != 2 || shape[1] < 0) {
      std::cerr << "the example needs an input of shape [dynamic, fixed]\n";
      return 3;
    }
    shape[0] = std::atoll(argv[3]);
    std::vector<float> values(static_cast<size_t>(shape[0] * shape[1]), 1.0f);
    auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    Ort::Value input = Ort::Value::CreateTensor<float>(memory, values.data(), values.size(),
                                                       shape.data(), shape.size());
    const char* inputs[] = {input_name.get()};
    const char* outputs[] = {output_name.get()};
    auto results = session.Run(Ort::RunOptions{nullptr}, inputs, &input, 1, outputs, 1);
    for (int64_t size : results[0].GetTensorTypeAndShapeInfo().GetShape()) std::cout << size << ' ';
    std::cout << '\n';
  } catch (const Ort::Exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
