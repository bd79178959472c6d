// Arguments that an operator writes. What it has checked, or is yet to read, must not lie in their
// memory.
#pragma once

#include <initializer_list>
#include <vector>

#include "check.h"

namespace qfx::cpu {

class Written {
 public:
  struct Argument {
    const char* name;
    const Tensor& tensor;
  };

  // Refuses arguments of which two, or two elements of one, share memory.
  Written(const char* op, std::initializer_list<Argument> arguments);

  // `read` itself, or a copy where its memory may be that of a written argument.
  Tensor apart_from(const Tensor& read) const;

 private:
  struct Run {
    const char *begin, *end;
  };
  class Layout;

  static bool intersect(Run a, Run b) { return a.begin < b.end && b.begin < a.end; }
  static bool overlap(const Layout& a, const Layout& b);

  std::vector<Run> extents_;  // of each argument, from its first byte to its last
};

}  // namespace qfx::cpu
