"""Defects of calibration and of the reports."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CALIBRATING = (
    Mutant(
        "a moving average forgets by the rest of its momentum",
        old="self.seen = (m * old[0] + (1 - m) * new[0],",
        new="self.seen = ((1 - m) * old[0] + m * new[0],",
        tests=("test_moving_average_forgets_by_its_momentum",),
    ),
    Mutant(
        "a histogram that grows loses its outer halves",
        old="self.counts[BINS // 4 : 3 * BINS // 4] = middle",
        new="self.counts[BINS // 4 : BINS // 2] = middle[: BINS // 4]",
        tests=("test_a_histogram_loses_nothing_and_forgets_the_order",),
    ),
    Mutant(
        "a percentile cuts off as much on each side as on both",
        old="half = allowed / 2",
        new="half = allowed",
        tests=("test_percentile_leaves_out_no_more_than_it_says",),
    ),
    Mutant(
        "a percentile keeps one bin less",
        old="return int((beyond > allowed).sum())",
        new="return int((beyond > allowed).sum()) - 1",
        tests=("test_percentile_leaves_out_no_more_than_it_says",),
    ),
    Mutant(
        "the zero point of a range has the wrong sign",
        old="return scale, min(max(qmin - round(low / scale), qmin), qmax)",
        new="return scale, min(max(qmin + round(low / scale), qmin), qmax)",
        tests=("test_steps_are_those_of_the_quantize_operator",),
    ),
    Mutant(
        "the entropy of a range forgets what it clips",
        old="reference[-1] += counts[values > clipped[1]].sum()",
        new="reference[-1] += 0",
        tests=("test_entropy_cuts_nothing_off_where_all_values_are_alike",),
    ),
    Mutant(
        "the magnitudes of features are those of the last batch",
        old="self.absmax = torch.maximum(self.absmax, x_mk.abs().amax(0))",
        new="self.absmax = x_mk.abs().amax(0)",
        tests=("test_a_sample_depends_on_the_rows_alone",),
    ),
    Mutant(
        "faulty rows are in the sample",
        old="x_mk = x_mk if finite.all() else x_mk[finite]",
        new="",
        tests=("test_the_largest_rows_stay_and_faulty_ones_do_not",),
    ),
    Mutant(
        "sites that read other views share a record",
        old="shared.setdefault((site.x, site.x_view), [])",
        new="shared.setdefault((site.x, ()), [])",
        tests=("test_rows_and_columns_of_one_activation_are_recorded_apart",),
    ),
    Mutant(
        "dynamic scales take the place of static ones for nothing",
        old="seconds = max(asked, int8_s) * 1.1 if fallback else int8_s",
        new="seconds = int8_s",
        tests=("test_a_static_preset_is_static_where_the_error_allows",),
    ),
    Mutant(
        "smoothing moves the weight's sizes, not the activation's",
        old="** (1 - strength) / x.clamp_min(_SMALLEST) ** strength",
        new="** strength / x.clamp_min(_SMALLEST) ** (1 - strength)",
        tests=("test_factors_move_the_strength_from_activations_to_weights",),
    ),
    Mutant(
        "a static range forgets the largest rows",
        old="watch.update(torch.cat([x, extreme]))",
        new="watch.update(x)",
        tests=("test_a_static_error_is_that_of_the_range_of_all_rows",),
    ),
    Mutant(
        "every feature is an outlier",
        old="largest.values > 10 * absmax.median()",
        new="largest.values >= 0 * absmax.median()",
        tests=("test_features_far_out_may_stay_float",),
    ),
    Mutant(
        "a choice spends its error again and again",
        old="            budget -= extra\n",
        new="",
        tests=("test_the_error_stays_within_the_goal",),
    ),
    Mutant(
        "the metric's bisection ends on the wrong side",
        old="    return choices[high]\n",
        new="    return choices[low]\n",
        tests=("test_the_metric_is_kept",),
    ),
    Mutant(
        "a trial quantizes what its recipe does not name",
        old="e if e.recipe else replace(e, scheme=None)",
        new="e",
        tests=("test_a_trial_leaves_float_what_its_recipe_does_not_name",),
    ),
    Mutant(
        "the ratio of powers is taken for one of amplitudes",
        old="10 * math.log10(power / noise)",
        new="20 * math.log10(power / noise)",
        tests=("test_error_is_that_of_the_values", "test_block[explain]"),
    ),
    Mutant(
        "the share of a site grows with its accuracy",
        old="levels = [-row.sqnr_db for",
        new="levels = [row.sqnr_db for",
        tests=("test_shares_are_noise_relative_to_signal",),
    ),
    Mutant(
        "linears in no graph are not listed",
        old="if name and id(module) not in ran:",
        new="if name and not ran:",
        tests=("test_layers_that_share_a_graph_have_their_own_lines_and_nothing_is_missing",),
    ),
    Mutant(
        "names in a page are markup",
        old="Environment(autoescape=True,",
        new="Environment(autoescape=False,",
        tests=("test_names_are_text_and_not_markup",),
    ),
    Mutant(
        "the page praises the site with the best error",
        old="level, row = min(noisy,",
        new="level, row = max(noisy,",
        tests=("test_the_facts_are_those_of_the_worst_site",),
    ),
    Mutant(
        "a report measures the noise of the float form",
        old="self.measured[start] = Measured(sqnr(result, output),",
        new="self.measured[start] = Measured(sqnr(result, result),",
        tests=("test_block[explain]", "test_bad_site_has_a_low_sqnr"),
    ),
    Mutant(
        "explain runs a bias's site without it",
        old='weight, b = graph.get_attr("w"), None if bias is None else graph.get_attr("b")',
        new='weight, b = graph.get_attr("w"), None',
        tests=("test_explain_runs_the_same_operators", "test_block[explain]"),
    ),
    Mutant(
        "GPTQ leaves the codes in the order of the columns' powers",
        old="codes_nk[:, order.columns] = codes_kn.t()",
        new="codes_nk[:] = codes_kn.t()",
        tests=("test_no_row_is_worse_than_rounded_to_nearest",),
    ),
    Mutant(
        "GPTQ takes off what it should add",
        old="aim = torch.addmm(w_kn[block], share[:start, block].t(), error_kn[:start])",
        new="aim = torch.addmm(w_kn[block], share[:start, block].t(), error_kn[:start], alpha=-1)",
        tests=("test_codes_are_the_nearest_to_what_is_left_to_them",),
    ),
    Mutant(
        "GPTQ keeps rows that it has made worse",
        old="torch.where(gains > 0, spread.codes",
        new="torch.where(gains == gains, spread.codes",
        tests=("test_no_row_is_worse_than_rounded_to_nearest",),
    ),
    Mutant(
        "codes serve any weight",
        old="if digest_for(w_nk, packing) != rounding.weight:",
        new="if False:",
        tests=("test_another_weight_is_refused", "test_codes_of_another_transform_are_refused"),
    ),
    Mutant(
        "codes are written over a model",
        old="if path.exists() and not _is_ours(path):",
        new="if False:",
        tests=("test_a_model_beside_the_recipe_is_not_written_over",),
    ),
    Mutant(
        "the bound of a guarded site is that of the nearest codes",
        old='return Stored({"blocks": blocks, "scale": scale}, triple)',
        new='return Stored({"blocks": blocks, "scale": scale}, '
        "ops.quantize.default(w_nk, axes, spec.bits, True, *turned))",
        tests=("test_a_guard_bounds_the_error_of_these_codes",),
    ),
)
