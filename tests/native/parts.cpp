// Work in parts that a team shares: each part once, whoever comes, and nobody waits for ever.
#include <thread>

#include "cpu/core/parallel.h"
#include "harness.h"

namespace qfx::test {
namespace {

constexpr struct {
  int64_t members, count, part;
} kTeams[] = {{1, 7, 3}, {2, 16, 1}, {3, 100, 8}, {5, 3, 2}, {4, 0, 1}, {7, 64, 64}};

std::vector<int32_t> all_once(int64_t count) {
  return std::vector<int32_t>(static_cast<size_t>(count), 1);
}

// Members that come one after another, on one thread, and all at once.
void check_members(Subject& subject) {
  for (const auto& [members, count, part] : kTeams) {
    for (bool at_once : {false, true}) {
      subject.begin(std::to_string(members) + " members, " + std::to_string(count) +
                    " in parts of " + std::to_string(part) + (at_once ? ", at once" : ", in turn"));
      std::vector<int32_t> seen(static_cast<size_t>(count), 0), whole(members, 0);
      cpu::Parts parts(members, count, part);
      const auto run = [&](int64_t i) {
        whole[i] = parts.run(i, [&](int64_t begin, int64_t end) {
          for (int64_t m = begin; m < end; ++m) ++seen[m];
        });
      };
      std::vector<std::thread> others;
      for (int64_t i = 0; i < members; ++i) {
        at_once ? void(others.emplace_back(run, i)) : run(i);
      }
      for (std::thread& other : others) other.join();
      subject.same(seen.data(), all_once(count).data(), count);
      subject.same(whole.data(), all_once(members).data(), members);
    }
  }
}

// What a part throws goes to its member; the others learn that it will never be done.
void check_failure(Subject& subject) {
  subject.begin("a part that fails");
  constexpr int64_t kMembers = 4;
  cpu::Parts parts(kMembers, 40, 1);
  std::vector<int32_t> left(kMembers, 0), thrown(kMembers, 0);
  std::vector<std::thread> members;
  for (int64_t i = 0; i < kMembers; ++i) {
    members.emplace_back([&, i] {
      try {
        left[i] = !parts.run(i, [](int64_t begin, int64_t) {
          if (begin == 13) throw Failure("of part 13");
        });
      } catch (const Failure&) {
        thrown[i] = 1;
      }
    });
  }
  int32_t ended = 0, failures = 0;
  for (int64_t i = 0; i < kMembers; ++i) {
    members[i].join();
    ended += left[i] + thrown[i];
    failures += thrown[i];
  }
  const int32_t all = kMembers, one = 1;
  subject.same(&ended, &all, 1);
  subject.same(&failures, &one, 1);
}

}  // namespace

void check_parts() {
  Subject subject("parts");
  check_members(subject);
  check_failure(subject);
  subject.passed();
}

}  // namespace qfx::test
