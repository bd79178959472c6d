// A strict reader of JSON texts from anywhere: nesting and the number of values are bounded, and no
// object has a key twice. Of numbers only integers have a value, since files need no others.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace qfx {

// What is in a file is not what it should be: a sentence without the name of the file.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Text of a file as a message shows it: the first characters, none of which moves a cursor.
std::string printable(std::string_view text);

class Json {
 public:
  enum class Kind { kNull, kBool, kInteger, kReal, kText, kList, kObject };

  Kind kind = Kind::kNull;
  int64_t integer = 0;  // of kInteger, and 0 or 1 of kBool
  std::string text;
  std::vector<std::string> names;  // of the items of an object
  std::vector<Json> items;

  // As a message shows it.
  std::string shown() const;

  // These throw Refused, in which `what` names the value, unless it is of this kind.
  int64_t integer_in(int64_t least, int64_t most, const std::string& what) const;
  const std::string& as_text(const std::string& what) const;
  const std::vector<Json>& as_list(const std::string& what) const;
  const Json& as_object(const std::string& what) const;
  const Json& at(std::string_view name) const;  // of an object
  const Json* find(std::string_view name) const;
};

// Throws Refused for a text that is not one JSON value.
Json parsed_json(std::string_view text);

}  // namespace qfx
