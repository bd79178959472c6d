"""Defects of names, of who shares compiled code, and of symbolic sizes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

NAMING = (
    Mutant(
        "a matmul is called as the code reaches it",
        old="node.meta[NAMED] = source if source in registered else registered[0]",
        new="node.meta[NAMED] = source or registered[0]",
        tests=("test_each_name_skips_its_matmul", "test_explain_says_each_linear_once_by_its_name"),
    ),
    Mutant(
        "of several names the code's own does not count",
        old="source if source in registered else registered[0]",
        new="registered[0]",
        tests=("test_each_name_skips_its_matmul",),
    ),
    Mutant(
        "parameters are not known by their names",
        old="            found.setdefault(id(part), [])",
        new="            found.setdefault(id(part) * isinstance(part, nn.Module), [])",
        tests=("test_each_name_skips_its_matmul",),
    ),
    Mutant(
        "buffers are not known by their names",
        old="            module.named_buffers(remove_duplicate=False),\n        ):",
        new="        ):",
        tests=("test_each_name_skips_its_matmul",),
    ),
    Mutant(
        "layers that are guarded share code",
        old="if config.skip or config.only or config.by_name:",
        new="if config.skip or config.only or config.recipe:",
        tests=("test_guards_of_layers_count_each_by_its_name",),
    ),
    Mutant(
        "layers that a pattern tells apart share code",
        old="return any(found != here for found in elsewhere)",
        new="return False",
        tests=("test_patterns_reach_the_layers_they_name",),
    ),
    Mutant(
        "layers that are decided alike are compiled apart",
        old="return any(found != here for found in elsewhere)",
        new="return True",
        tests=(
            "test_what_is_decided_alike_is_compiled_once",
            "test_more_layers_than_dynamo_recompiles",
        ),
    ),
    Mutant(
        "weights that a function is given share code",
        old="known = [item for module in around for item in module.named_parameters()]",
        new="known: list[Any] = []",
        tests=(
            "test_layers_that_a_function_is_given_in_parts",
            "test_layers_that_a_function_is_given_have_their_names",
        ),
    ),
    Mutant(
        "a recipe's names are those below the outermost module",
        old="return self.running[known.index(max(known)) :]",
        new="return self.running",
        tests=("test_a_recipe_serves_its_model_inside_another",),
    ),
    Mutant(
        "an operator of the model itself is not counted",
        old="    token = str(node.meta.get(SCHEME) or row.token(arguments))\n",
        new="    token = row.token(arguments)\n",
        tests=("test_int8_operators_of_the_model_itself",),
    ),
    Mutant(
        "an operator's rows are those of its first matrix",
        old="return math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1], y.shape[-1]",
        new="return 1, x.shape[-2], x.shape[-1], y.shape[-1]",
        tests=("test_int8_operators_of_the_model_itself",),
    ),
    Mutant(
        "what the model's graphs write stays written",
        old="        restore_later(written(arguments))\n",
        new="",
        tests=("test_of_a_function_what_its_graphs_write_is_put_back", "test_nothing_is_changed"),
    ),
    Mutant(
        "a size that depends on data is guarded",
        old='        return "it depends on data"\n',
        new="        pass\n",
        tests=("test_no_guard_breaks_a_promise",),
    ),
    Mutant(
        "a range that the user marked is guarded",
        old="        if marked_range is not None:",
        new="        if False:",
        tests=("test_no_guard_breaks_a_promise",),
    ),
    Mutant(
        "a symbolic size is the number that it had",
        old="return seen if isinstance(seen, int) else None",
        new="return int(size)",
        tests=("test_program[shapes]",),
    ),
    Mutant(
        "opened operators have the sizes of the captured call",
        old="            return self._size(argument.node.expr)\n",
        new="            return int(argument)\n",
        tests=("test_program[attention]",),
    ),
)
