"""Defects of policy: patterns, gains, break-even, costs, the values that say how."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLANNING = (
    Mutant(
        "skip is ignored",
        old="    for pattern in config.skip:\n        if fits(pattern, candidates):",
        new="    for pattern in ():\n        if fits(pattern, candidates):",
        tests=("test_patterns[plan]",),
    ),
    Mutant(
        "only keeps the others",
        old="if config.only and not any(fits(pattern, candidates)",
        new="if config.only and any(fits(pattern, candidates)",
        tests=("test_patterns[plan]",),
    ),
    Mutant(
        "the least gain itself is too little",
        old="if estimate.gain < config.minimum_gain:",
        new="if estimate.gain <= config.minimum_gain:",
        tests=("test_the_least_gain_is_enough",),
    ),
    Mutant(
        "products become int8 without a gain",
        old="max(given.config.minimum_gain, 1.0)",
        new="given.config.minimum_gain",
        tests=("test_products_have_to_gain",),
    ),
    Mutant(
        "a weight that trains is priced as if it did not",
        old="more = cost.training(work)",
        new="more = 0.0",
        tests=("test_a_weight_that_trains_is_packed_at_every_call_which_has_its_price",),
    ),
    Mutant(
        "a pattern fits the end of a name's part",
        old='shapes = (pattern, f"*.{pattern}",',
        new='shapes = (pattern, f"*{pattern}",',
        tests=("test_fits",),
    ),
    Mutant(
        "all calls of a module follow the recipe of the first",
        old="calls[site.name] += 1",
        new="calls[site.name] += 0",
        tests=("test_calls_of_one_module_have_their_own_recipes",),
    ),
    Mutant(
        "a recipe of another shape is taken",
        old="if (site.n or named.n, site.k or named.k) != (named.n, named.k):",
        new="if (site.n or named.n) != named.n:",
        tests=("test_a_recipe_of_another_model_is_an_error",),
    ),
    Mutant(
        "break-even is one too low",
        old="else (below, middle)\n    return above",
        new="else (below, middle)\n    return below",
        tests=("test_condition",),
    ),
    Mutant(
        "int8 also where it has just ceased to gain",
        old="sympy.Lt(size, edges[i])",
        new="sympy.Le(size, edges[i])",
        tests=("test_condition",),
    ),
    Mutant(
        "the sizes of a decision are not guarded",
        old="        tie_to_sizes(plan)\n        compile_apart(",
        new="        compile_apart(",
        tests=("test_both_sides_occur",),
    ),
    Mutant(
        "a panel that is not full costs nothing",
        old=".linear(m, k, -(-n // PANEL) * PANEL)",
        new=".linear(m, k, max(n // PANEL, 1) * PANEL)",
        tests=("test_uneven_sizes_cost_what_was_measured",),
    ),
    Mutant(
        "rotation costs nothing",
        old="        if work.rotated:\n",
        new="        if False:\n",
        tests=("test_rotation_costs_its_rows_and_elements_where_a_block_fits",),
    ),
    Mutant(
        "training turns the weight once less",
        old='2 * table.over("turn", n, k)',
        new='table.over("turn", n, k)',
        tests=("test_training_turns_the_weight_and_both_gradients",),
    ),
    Mutant(
        "the elements of a pass are counted for one row",
        old="return m * (row_s + k * element_s)",
        new="return m * row_s + k * element_s",
        tests=("test_rotation_costs_its_rows_and_elements_where_a_block_fits",),
    ),
    Mutant(
        "a batch costs what the measured one did",
        old="return call + max(whole - call, 0.0) * work.batch / BATCH",
        new="return call + max(whole - call, 0.0)",
        tests=("test_a_batch_takes_a_call_and_the_time_of_its_matrices",),
    ),
    Mutant(
        "instruction sets share a table of costs",
        old="build, isa, shared,",
        new="build, shared,",
        tests=("test_tables_of_other_types_threads_and_instruction_sets_are_apart",),
    ),
    Mutant(
        "a table that did not settle stays",
        old="if before.settled or tries >= TRIES:",
        new="if before is not None:",
        tests=("test_a_table_whose_sweeps_were_apart_is_measured_again",),
    ),
    Mutant(
        "of two measurements the last stays",
        old="if before is not None and before.spread < measured.spread:",
        new="if False:",
        tests=("test_a_high_spread_is_measured_again_and_the_best_stays",),
    ),
    Mutant(
        "one disturbed sample decides",
        old="times[way, load] = min(times[way, load], taken)",
        new="times[way, load] = taken",
        tests=("test_one_disturbed_sample_of_each_round_changes_nothing",),
    ),
    Mutant(
        "rounds that differ are taken for agreeing",
        old="spread = min([spread, *between])",
        new="spread = min([spread, *(0.0 for _ in between)])",
        tests=("test_rounds_that_do_not_agree_are_counted_and_told",),
    ),
    Mutant(
        "threads that waited for cores are believed",
        old="waited = question.together and not machine.has_free_cores()",
        new="waited = False",
        tests=("test_threads_that_waited_for_cores_say_nothing",),
    ),
    Mutant(
        "what was set by hand is overwritten",
        old="if _origin(isa, name, in_use[name]) != BY_HAND:",
        new="if isa:",
        tests=("test_what_was_set_by_hand_stays",),
    ),
    Mutant(
        "what a pinned plan does not name goes by cost",
        old="    if given.pinned:\n        return Entry(match, None, _NOT_PINNED)\n",
        new="",
        tests=("test_what_a_pinned_plan_does_not_name_stays_float",),
    ),
    Mutant(
        "products of a pinned plan all follow the first of their name",
        old="            calls[m.name] += 1",
        new="            calls[m.name] += 0",
        tests=("test_products_of_one_name_are_pinned_apart",),
    ),
    Mutant(
        "a kept time of zero is believed",
        old="return seconds(raw, least=2.0**-1022)",
        new="return seconds(raw)",
        tests=("test_a_kept_time_that_is_none_is_measured_anew",),
    ),
    Mutant(
        "outliers cost nothing",
        old="        if work.outliers:\n            int8_s +=",
        new="        if False:\n            int8_s +=",
        tests=("test_outliers_are_a_float_linear_beside_the_others",),
    ),
    Mutant(
        "on a GPU scales per token are priced as one",
        old='("tensor",) if scheme.x.axes == PER_TENSOR else ("quantize",)',
        new='("quantize",) if scheme.x.axes == PER_TENSOR else ("tensor",)',
        tests=("test_a_scheme_is_a_product_and_a_pass",),
    ),
    Mutant(
        "on a GPU a rotated weight that trains turns once less",
        old="3 * self._turned(work, work.n)",
        new="2 * self._turned(work, work.n)",
        tests=("test_a_rotated_weight_that_trains_costs_its_rotations",),
    ),
    Mutant(
        "a GPU's table without rotations is asked for them",
        old='*(["rotate"] if scheme.rotation else [])',
        new="",
        tests=("test_a_linear_needs_its_product_and_its_passes",),
    ),
    Mutant(
        "a cost model is asked for what it lacks",
        old="return model.lacks(kind, match.float_type, scheme) or model",
        new="return model",
        tests=(
            "test_what_the_table_lacks_stays_float_with_the_reason",
            "test_what_no_table_was_made_for_is_a_reason_on_every_device",
        ),
    ),
    Mutant(
        "one query is priced by a model without times of it",
        old="if not one or cost is None or isinstance(cost, str) or batch",
        new="if not one or cost is None or batch",
        tests=("test_attentions_without_those_of_one_query",),
    ),
    Mutant(
        "a kept table of other sizes is read",
        old="!= dict.fromkeys(GRIDS, self.axes)",
        new="== {}",
        tests=("test_a_table_of_another_kind_or_of_other_sizes_is_refused",),
    ),
    Mutant(
        "beyond the last point a grid of logs goes on as between the last two",
        old="return i, min(max(t, 0.0), 1.0)",
        new="return i, max(t, 0.0)",
        tests=("test_beyond_the_last_point_work_costs_what_it_did_there",),
    ),
    Mutant(
        "a block that does not divide K is rotated",
        old="b <= self.rotation and k and k % b == 0",
        new="b <= self.rotation and k and k >= b",
        tests=("test_the_default_rotates_the_largest_block_that_fits",),
    ),
    Mutant(
        "a preset forgets the int8 backward",
        old="return replace(PRESETS[self.scheme], backward=self.backward)",
        new="return PRESETS[self.scheme]",
        tests=("test_the_int8_backward_depends_on_the_seed_alone",),
    ),
    Mutant(
        "a factor of another length is taken",
        old="if self.factor is not None and len(self.factor) != self.k:",
        new="if self.factor is not None and len(self.factor) > self.k:",
        tests=("test_what_does_not_fit_together",),
    ),
    Mutant(
        "a recipe of a later version is read",
        old="if type(version) is not int or version != VERSION:",
        new="if type(version) is not int or version < VERSION:",
        tests=("test_text_that_is_no_recipe",),
    ),
    Mutant(
        "an asymmetric weight without groups is called one of a single scale",
        old="return bool(self.group) or not self.symmetric",
        new="return bool(self.group)",
        tests=(
            "test_forms_have_the_same_bits_within_the_bound",
            "test_schemes_have_the_tables_of_their_kinds",
        ),
    ),
    Mutant(
        "a guard of static scales is promised",
        old='return "its scale is static" if scheme.calibrated else None',
        new="return None",
        tests=(
            "test_static_sites_of_a_recipe_and_sites_that_train_are_not_guarded",
            "test_schemes_without_a_guard_say_so",
        ),
    ),
)
