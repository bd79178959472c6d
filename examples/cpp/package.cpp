// Runs a package of AOTInductor that was compiled with qfx, without Python:
//
//   package model.pt2 4 64 input.bin result.bin
//
// input.bin holds a float32 matrix of 4 x 64; result.bin will hold the first result. The operators
// of qfx are known because libqfx.so is linked (qfx::operators).
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <vector>

int main(int count, char** arguments) {
  if (count != 6) {
    std::fprintf(stderr, "usage: package FILE ROWS COLUMNS INPUT RESULT\n");
    return 2;
  }
  try {
    const at::Tensor x = at::empty({std::atol(arguments[2]), std::atol(arguments[3])});
    std::ifstream input(arguments[4], std::ios::binary);
    if (!input.read(static_cast<char*>(x.data_ptr()), static_cast<std::streamsize>(x.nbytes()))) {
      std::fprintf(stderr, "%s has fewer bytes than the input\n", arguments[4]);
      return 1;
    }
    torch::inductor::AOTIModelPackageLoader model(arguments[1]);
    const at::Tensor result = model.run({x})[0].contiguous();
    std::ofstream output(arguments[5], std::ios::binary);
    output.write(static_cast<const char*>(result.data_ptr()),
                 static_cast<std::streamsize>(result.nbytes()));
    return output.good() ? 0 : 1;
  } catch (const std::exception& why) {
    std::fprintf(stderr, "%s\n", why.what());
    return 1;
  }
}
