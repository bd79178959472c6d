#include "cpu/core/thrown.h"

#include <new>
#include <stdexcept>

#include "memory.h"

namespace qfx::cpu {

struct FirstThrown::Kept {
  virtual ~Kept() = default;
  [[noreturn]] virtual void throw_again() const = 0;
};

namespace {

template <typename T>
struct KeptAs final : FirstThrown::Kept {
  T value;

  explicit KeptAs(const T& of) : value(of) {}
  [[noreturn]] void throw_again() const override { throw value; }
};

template <typename T>
std::unique_ptr<const FirstThrown::Kept> kept(const T& value) {
  return std::make_unique<KeptAs<T>>(value);
}

// The exception of the catch block that calls it.
std::unique_ptr<const FirstThrown::Kept> kept_in_flight() {
  try {
    throw;
  } catch (const OutOfMemory& why) {
    return kept(why);
  } catch (const std::out_of_range& why) {
    return kept(why);
  } catch (const std::invalid_argument& why) {
    return kept(why);
  } catch (const std::bad_alloc&) {
    return kept(std::bad_alloc());
  } catch (const std::exception& why) {
    return kept(std::runtime_error(why.what()));
  } catch (...) {
    return kept(std::runtime_error("an error without a text"));
  }
}

}  // namespace

FirstThrown::FirstThrown() = default;
FirstThrown::~FirstThrown() = default;

void FirstThrown::keep() noexcept {
  if (!taken_.test_and_set()) kept_ = kept_in_flight();
}

void FirstThrown::throw_again() const {
  if (kept_ != nullptr) kept_->throw_again();
}

}  // namespace qfx::cpu
