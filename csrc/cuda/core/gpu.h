// What the choice of a kernel knows of a GPU.
#pragma once

#include <string>

namespace qfx::cuda {

struct Gpu {
  std::string name;
  int capability;  // 75, 80, 86, 89, 90, ...
  int multiprocessors;
};

}  // namespace qfx::cuda
