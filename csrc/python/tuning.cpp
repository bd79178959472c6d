// qfx._C: parameters of formats.
#include <deque>

#include "python/convert.h"
#include "python/parts.h"

namespace qfx::python {
namespace {

// The parameters that a dict of dicts holds: format -> name -> value; and the texts they refer to.
class Parameters {
 public:
  explicit Parameters(PyObject* formats) {
    for (auto& [format, of_format] : items(formats)) {
      const char* name = keep(text_of(format.get()));
      all_.push_back({name, nullptr, nullptr, false, 0});  // it is looked up at least
      add(name, of_format.get());
    }
  }
  Parameters(const char* format, PyObject* of_format) { add(format, of_format); }

  const QfxParameter* data() const { return all_.data(); }
  int64_t size() const { return static_cast<int64_t>(all_.size()); }

 private:
  static std::vector<std::pair<Object, Object>> items(PyObject* dict) {
    const Object list = Object::taken(PyMapping_Items(dict));
    std::vector<std::pair<Object, Object>> found;
    for (Py_ssize_t i = 0; i < PyList_Size(list.get()); ++i) {
      PyObject* pair = PyList_GetItem(list.get(), i);
      found.emplace_back(Object::shared(PyTuple_GetItem(pair, 0)),
                         Object::shared(PyTuple_GetItem(pair, 1)));
    }
    return found;
  }

  void add(const char* format, PyObject* of_format) {
    for (auto& [name, value] : items(of_format)) {
      QfxParameter made = {format, keep(text_of(name.get())), nullptr, false, 0};
      made.text = keep(text_of(Object::taken(PyObject_Str(value.get())).get()));
      made.is_integer = PyLong_Check(value.get()) != 0;
      if (made.is_integer) made.integer = fitting(made, value.get());
      all_.push_back(made);
    }
  }

  static int64_t fitting(const QfxParameter& made, PyObject* value) {
    int overflow = 0;
    const int64_t found = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow == 0) return found;
    PyErr_Format(PyExc_ValueError, "%s=%s does not fit into 64 bits", made.name, made.text);
    throw Raised();
  }

  const char* keep(std::string text) { return texts_.emplace_back(std::move(text)).c_str(); }

  std::deque<std::string> texts_;
  std::vector<QfxParameter> all_;
};

Object tunings(const char* isa, bool defaults) {
  const auto fields = rows_of(qfx_api_tuning_fields);
  Object formats = Object::taken(PyDict_New());
  const auto rows =
      rows_of([&](QfxTake take, void* to) { return qfx_api_tuning(isa, defaults, take, to); });
  for (const ResultRow& row : rows) {
    Object format = Object::taken(PyDict_New());
    for (size_t i = 0; i < fields.size(); ++i) {
      set_item(format, fields[i].texts.at(0).c_str(), object_of(row.numbers.at(i)));
    }
    set_item(format, "hint", object_of(row.texts.at(1)));
    set_item(formats, row.texts.at(0).c_str(), format);
  }
  return formats;
}

Object tuning(PyObject*, PyObject* args, PyObject* named) {
  const char* isa = nullptr;
  read_arguments(args, named, "s:tuning", {"isa"}, &isa);
  return tunings(isa, false);
}

Object default_tuning(PyObject*, PyObject* args, PyObject* named) {
  const char* isa = nullptr;
  read_arguments(args, named, "s:default_tuning", {"isa"}, &isa);
  return tunings(isa, true);
}

Object set(PyObject* args, PyObject* named, const char* format, bool check_only) {
  const char* isa = nullptr;
  PyObject* given = nullptr;
  read_arguments(args, named, format, {"isa", "tuning"}, &isa, &given);
  const Parameters parameters(given);
  check(qfx_api_set_tuning(isa, parameters.data(), parameters.size(), check_only));
  return none();
}

Object set_tuning(PyObject*, PyObject* args, PyObject* named) {
  return set(args, named, "sO:set_tuning", false);
}

Object check_tuning(PyObject*, PyObject* args, PyObject* named) {
  return set(args, named, "sO:check_tuning", true);
}

Object choices(PyObject*, PyObject* args, PyObject* named) {
  const char* isa = nullptr;
  read_arguments(args, named, "s:choices", {"isa"}, &isa);
  const auto rows = rows_of([&](QfxTake take, void* to) { return qfx_api_choices(isa, take, to); });
  std::vector<Object> found;
  for (const ResultRow& row : rows) {
    Object dict = Object::taken(PyDict_New());
    set_item(dict, "name", object_of(row.texts.at(0)));
    set_item(dict, "few_rows", object_of(row.numbers.at(0)));
    set_item(dict, "pair_rows", object_of(row.numbers.at(1)));
    set_item(dict, "below", object_of(row.texts.at(1)));
    found.push_back(std::move(dict));
  }
  return list_of(std::move(found));
}

struct Timed {
  QfxTimedProduct* product = nullptr;
  ~Timed() { qfx_api_free_timed_product(product); }
};

Timed* make_timed(PyObject* args, PyObject* named) {
  int64_t most_rows = 0, k = 0, n = 0, weights = 0;
  read_arguments(args, named, "LLLL:TimedProduct", {"most_rows", "k", "n", "weights"}, &most_rows,
                 &k, &n, &weights);
  auto made = std::make_unique<Timed>();
  check(qfx_api_make_timed_product(most_rows, k, n, weights, &made->product));
  return made.release();
}

Object seconds(PyObject* self, PyObject* args, PyObject* named) {
  const char *isa = nullptr, *format = nullptr;
  PyObject* given = nullptr;
  int64_t rows = 0, calls = 0;
  double found = 0;
  read_arguments(args, named, "ssOLL:seconds", {"isa", "format", "parameters", "rows", "calls"},
                 &isa, &format, &given, &rows, &calls);
  const Parameters parameters(format, given);
  check(qfx_api_time_product(held<Timed>(self).product, isa, format, parameters.data(),
                             parameters.size(), rows, calls, &found));
  return object_of(found);
}

PyMethodDef functions[] = {
    method<tuning>(
        "tuning",
        "tuning(isa)\n--\n\nThe parameters in use of an instruction set's formats: format -> "
        "parameter "
        "-> value."),
    method<default_tuning>("default_tuning",
                           "default_tuning(isa)\n--\n\nThose in use on this family of processors "
                           "where none were set."),
    method<set_tuning>(
        "set_tuning",
        "set_tuning(isa, tuning)\n--\n\nSets some parameters of some formats, given as `tuning` "
        "returns "
        "them. ValueError for a name that is none and a value out of bounds; then nothing is set. "
        "amx "
        "shares the format s8s8 of avx512vnni."),
    method<check_tuning>("check_tuning",
                         "check_tuning(isa, tuning)\n--\n\nRaises ValueError or TypeError where "
                         "set_tuning would, and "
                         "sets nothing."),
    method<choices>("choices",
                    "choices(isa)\n--\n\nWhat there is to choose for each format of an instruction "
                    "set: dicts of "
                    "name, few_rows and pair_rows (the most rows for which `hint` and `streams` "
                    "count), below ('' "
                    "for none)."),
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef methods[] = {
    method<seconds>(
        "seconds",
        "seconds(isa, format, parameters, rows, calls)\n--\n\nSeconds of one product on a format, "
        "with "
        "some parameters other than those in use. calls=0: its weight, the next in turn, comes "
        "from "
        "memory; else the mean of so many calls."),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_tuning(PyObject* module) {
  add_functions(module, functions);
  add_class<Timed, make_timed>(
      module, "TimedProduct",
      "Products of codes [rows, k] and one of several weights [n, k], to be timed.",
      {{Py_tp_methods, methods}});
}

}  // namespace qfx::python
