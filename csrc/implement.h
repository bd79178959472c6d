// Registering an operator's kernel. What it is called by goes in front of an error of memory, which
// arises far from where the name is known.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <utility>

#include "memory.h"

namespace qfx {

template <size_t size>
struct Name {
  char text[size];

  constexpr Name(const char (&from)[size]) { std::copy_n(from, size, text); }  // NOLINT: implicit
};

template <Name name, auto kernel>
struct Named;

template <Name name, typename Result, typename... Arguments, Result (*kernel)(Arguments...)>
struct Named<name, kernel> {
  static Result run(Arguments... arguments) {
    try {
      return kernel(std::forward<Arguments>(arguments)...);
    } catch (const OutOfMemory& why) {
      STD_TORCH_CHECK(false, name.text, ": ", why.what());
    } catch (const std::bad_alloc&) {
      STD_TORCH_CHECK(false, name.text, ": out of memory. A small allocation failed");
    }
  }
};

// implement<"quantize", &quantize>(m)
template <Name name, auto kernel>
void implement(torch::stable::detail::StableLibrary& m) {
  m.impl(name.text, TORCH_BOX((&Named<name, kernel>::run)));
}

}  // namespace qfx
