"""Faults F1 to F35: the tests that inject each, and the lines that say how they ended.

A test is named file.py::function. Its markers decide which of its cases belong to the short tier,
`make faults`, which is a part of `make test`; `make faults-long` runs all. A test that takes the
fixture `figures` adds numbers to the line of its fault and to the last line.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FAULTS: dict[str, tuple[str, str]] = {
    "F1": (
        "kill -9 of a rank or of the launcher at a random moment",
        "test_kill.py::test_kills_at_random_moments test_kill.py::test_kills_of_programs "
        "test_launch.py::test_ranks_die_with_their_launcher test_orphans.py::test_ranks_end_with_a_killed_launcher "
        "test_orphans.py::test_a_rank_that_begins_after_torchrun_ended "
        "test_orphans.py::test_programs_between test_orphans.py::test_both_programs_of_deepspeed "
        "test_orphans.py::test_training_under_real_launchers "
        "test_runs_on_ranks.py::test_a_killed_rank_is_reported",
    ),
    "F2": (
        "kill -9 at each named point of a save, on each rank",
        "test_kill.py::test_kill_at_each_point_of_the_save test_publish.py::test_killed_at_every_point "
        "test_native_ranks.py::test_a_rank_is_killed_while_others_wait "
        "test_loop.py::test_a_kill_before_the_tracker_of_the_last_step",
    ),
    "F3": (
        "state that is not restored must show",
        "test_kill.py::test_control_without_restoring_differs test_exact.py::test_forgotten_state_shows "
        "test_exact.py::test_a_curve_of_something_else_is_outside_the_bound",
    ),
    "F4": (
        "kill -9 during the recovery itself",
        "test_kill.py::test_kills_during_the_recovery "
        "test_loop.py::test_a_finetune_killed_before_its_first_save_does_not_start_from_random_weights",
    ),
    "F5": (
        "going on in another layout",
        "test_runs_on_ranks.py::test_a_run_continues_in_another_layout "
        "test_resharding.py::test_a_checkpoint_continues_in_another_layout "
        "test_native_ranks.py::test_any_cutting_to_any_other "
        "test_elastic.py::test_4_to_3_to_4_machines test_elastic.py::test_a_machine_is_lost_and_comes_back "
        "test_loader.py::test_cyclic_epochs_do_not_depend_on_the_layout",
    ),
    "F6": (
        "no space left while saving",
        "test_train.py::test_full_disk_keeps_the_last_checkpoint "
        "test_publish.py::test_a_write_that_fails_half_way_leaves_the_previous_step "
        "test_native_ranks.py::test_one_ranks_full_disk_fails_the_save_of_all "
        "test_background_saving.py::test_going_on_after_a_failed_save "
        "test_background_saving.py::test_the_last_save_must_succeed "
        "test_background_saving.py::test_rows_wait_while_the_disk_is_full",
    ),
    "F7": (
        "a folder that is read-only, gone or a file; I/O errors",
        "test_publish.py::test_failures_are_reported test_publish.py::test_a_folder_is_checked_before_the_first_step "
        "test_publish.py::test_a_step_that_cannot_be_opened_is_not_damaged "
        "test_native_ranks.py::test_a_folder_that_nodes_do_not_share_is_refused "
        "test_train.py::test_an_error_of_the_disk_names_its_file",
    ),
    "F8": (
        "one bit flipped in a checkpoint",
        "test_native.py::test_200_bit_flips_never_load test_publish.py::test_200_single_bit_flips_in_all_files "
        "test_publish.py::test_damage_names_file_and_offset",
    ),
    "F9": (
        "files of a checkpoint cut, empty, missing, or named outside of it",
        "test_publish.py::test_a_damaged_step_falls_back_to_the_previous_one "
        "test_publish.py::test_a_manifest_cannot_name_files_outside_its_folder "
        "test_publish.py::test_a_hostile_manifest_is_damaged test_publish.py::test_a_huge_manifest_is_not_read "
        "test_native.py::test_a_hostile_index_is_damaged test_native_ranks.py::test_all_ranks_load_the_same_step "
        "test_megatron_saving.py::test_a_damaged_step_is_skipped",
    ),
    "F10": (
        "a tracker file that is empty, garbage or ahead",
        "test_publish.py::test_a_tracker_without_a_number_is_ignored_or_refused "
        "test_publish.py::test_a_tracker_ahead_of_us_is_refused",
    ),
    "F11": (
        "no checkpoint that is whole",
        "test_publish.py::test_damage_of_all_steps_is_no_fresh_start "
        "test_loop.py::test_a_missing_checkpoint_is_refused_where_one_is_needed",
    ),
    "F12": (
        "leftovers of killed saves, clocks set back",
        "test_publish.py::test_order_is_by_step_and_leftovers_are_cleared "
        "test_publish.py::test_an_unfinished_step_is_no_checkpoint",
    ),
    "F13": (
        "a second launcher on the same folder",
        "test_publish.py::test_a_second_writer_learns_who_has_the_folder "
        "test_train.py::test_second_run_on_the_folder_is_refused",
    ),
    "F14": (
        "a save in the background that fails",
        "test_background_saving.py::test_a_failure_is_reported_within_one_step "
        "test_background_saving.py::test_ranks_save_together_and_share_a_failure "
        "test_background_saving.py::test_a_failure_is_reported_when_something_else_ends_the_run",
    ),
    "F15": (
        "weights that change while they are saved in the background",
        "test_background_saving.py::test_a_save_holds_the_numbers_of_its_own_step "
        "test_background_saving.py::test_a_change_after_the_save_began_is_not_written "
        "test_background_saving.py::test_a_save_has_the_state_of_its_step",
    ),
    "F16": (
        "SIGTERM or SIGINT, once and twice",
        "test_train.py::test_signal_finishes_the_step_and_saves test_fit.py::test_signal "
        "test_fit.py::test_a_warning test_train.py::test_a_signal_during_the_last_validation_saves "
        "test_runs_on_ranks.py::test_one_ranks_signal_ends_all test_launch.py::test_signals_are_passed_on",
    ),
    "F17": (
        "a rank that hangs",
        "test_watchdog.py::test_a_stopped_rank test_watchdog.py::test_every_way_to_hang "
        "test_two_machines.py::test_a_cut_cable_ends_both_machines test_gloo.py::test_the_time_out_is_passed_on "
        "test_connect.py::test_a_missing_rank_is_named",
    ),
    "F18": ("a rank that is slow", "test_stragglers.py::test_a_slow_rank_is_named_and_the_run_goes_on"),
    "F19": (
        "one rank that fails or leaves",
        "test_launch.py::test_exit_status test_launch.py::test_the_cause_of_several_failures "
        "test_connect.py::test_which_errors_mean_a_lost_rank test_device.py::test_the_host_refuses_memory "
        "test_device.py::test_limits_on_address_space",
    ),
    "F20": (
        "NaN or infinity in a gradient, a loss or a weight",
        "test_precision.py::test_a_bad_loss_never_reaches_the_weights test_precision.py::test_stop "
        "test_precision.py::test_on_nonfinite test_zero.py::test_a_non_finite_number_changes_nothing "
        "test_zero_ranks.py::test_a_non_finite_number_on_one_rank_stops_all "
        "test_same_losses.py::test_an_overflow_on_one_rank_is_skipped_by_all "
        "test_runs_on_ranks.py::test_not_finite_on_all_ranks test_diagnosis.py::test_on_one_rank "
        "test_diagnosis.py::test_on_ranks test_guard.py::test_rollback "
        "test_guard.py::test_rollback_without_a_checkpoint "
        "test_guard.py::test_rollback_passes_over_a_damaged_checkpoint test_guard.py::test_a_spike",
    ),
    "F21": (
        "a replica with other weights",
        "test_replicas.py::test_the_rank_that_differs_is_named_within_the_interval "
        "test_replicas.py::test_a_save_compares test_replicas.py::test_equal_copies_are_no_alarm "
        "test_replicas.py::test_every_bit_counts",
    ),
    "F22": (
        "bad lines in the text",
        "test_data_faults.py::test_bad_lines test_preprocess_workers.py::test_a_stream_cut_short "
        "test_preprocess.py::test_bad_lines_are_counted_by_kind_and_no_good_line_is_lost "
        "test_text.py::test_tables_damaged_anywhere_are_reported",
    ),
    "F23": (
        "kill -9 while text is prepared",
        "test_preprocess_workers.py::test_killed_at_any_moment_it_continues_and_ends_with_the_same_bytes "
        "test_preprocess_workers.py::test_killed_alone test_indexed.py::test_killed_at_every_point_of_publishing "
        "test_overwrite.py::test_a_kill_between_two_pairs_goes_on "
        "test_overwrite.py::test_a_kill_while_data_are_replaced_leaves_no_mixture",
    ),
    "F24": (
        "damaged token files",
        "test_data_faults.py::test_damaged_files_are_refused test_indexed.py::test_truncated_everywhere "
        "test_indexed.py::test_damaged test_indexed.py::test_other_inconsistencies "
        "test_data_commands.py::test_every_cut_and_swap_is_refused "
        "test_loader.py::test_an_id_outside_the_vocabulary_names_sample_and_place",
    ),
    "F25": (
        "an index cache that is half written or of other data",
        "test_samples.py::test_damaged_caches_are_rebuilt test_samples.py::test_cache_is_used_and_never_stale "
        "test_samples.py::test_files_of_a_killed_builder_are_removed",
    ),
    "F26": (
        "data replaced under a run",
        "test_train.py::test_changed_data_is_noted_on_resume "
        "test_indexed.py::test_fingerprint_tells_data_apart_but_not_times "
        "test_text.py::test_a_table_that_was_replaced_is_read_again "
        "test_preprocess_workers.py::test_an_input_that_changes_while_it_is_read",
    ),
    "F27": (
        "files that would run code",
        "test_hostile_files.py::test_hostile_files test_hostile_files.py::test_their_payloads_work "
        "test_pickles.py::test_an_unknown_class_is_refused_by_name_and_only_trust_runs_it",
    ),
    "F28": (
        "files that would take all memory or time",
        "test_hostile_files.py::test_hostile_files test_native.py::test_a_huge_header_is_noticed_and_never_parsed "
        "test_pickles.py::test_limits_of_time_and_memory test_text.py::test_a_small_file_that_unpacks_to_much "
        "test_flags.py::test_a_file_that_stands_for_gigabytes",
    ),
    "F29": (
        "wrong configuration files and flags",
        "test_flags.py::test_hostile_files test_flags.py::test_words test_flags.py::test_words_of_whole_configurations "
        "test_flags.py::test_all_problems_at_once test_lazy_config.py::test_anything_else_is_refused_soon "
        "test_deepspeed_config.py::test_refusals test_deepspeed_config.py::test_unreadable",
    ),
    "F30": (
        "malformed requests to the server",
        "test_limits.py::test_malformed_requests_are_refused test_limits.py::test_a_large_body_is_refused_at_once "
        "test_limits.py::test_a_large_header_is_refused test_openai.py::test_refusals_name_the_field "
        "test_watch_app.py::test_nonsense_is_refused",
    ),
    "F31": (
        "200 slow clients of the server",
        "test_limits.py::test_slow_clients_are_closed_and_nobody_waits_for_them "
        "test_limits.py::test_a_slow_header_is_named test_limits.py::test_a_client_that_does_not_read_is_closed "
        "test_limits.py::test_too_many_connections",
    ),
    "F32": (
        "64 clients at once, and clients that leave",
        "test_limits.py::test_load_is_answered_or_refused_and_never_mixed_up "
        "test_limits.py::test_work_stops_when_the_client_leaves test_limits.py::test_a_client_that_leaves_the_queue",
    ),
    "F33": (
        "SIGTERM to a server at work",
        "test_serve.py::test_sigterm_lets_answers_finish test_limits.py::test_answers_that_take_longer_than_the_end",
    ),
    "F34": (
        "another hash seed, locale, time zone or folder",
        "test_environment.py::test_a_run_does_not_depend_on_the_environment",
    ),
    "F35": ("kills for minutes (500: make faults-soak)", "test_soak.py::test_soak"),
}


def tests_of(fault: str) -> list[str]:
    return FAULTS[fault][1].split()


NAMED = frozenset(test for fault in FAULTS for test in tests_of(fault))


def existing() -> list[str]:
    """Return the names of all tests, as the table has them."""
    out = []
    for path in Path(__file__).parents[1].glob("**/test_*.py"):
        out += [f"{path.name}::{name}" for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)]
    return out


def name_of(node: str) -> str:
    """Return the id of a test as the table names it: without folders and case."""
    return node.partition("[")[0].rpartition("/")[2]


def lines(reports: Iterable[Any]) -> list[str]:
    """Return a line for each fault whose tests ran, and a summary; `reports` are pytest's."""
    outcomes: dict[str, dict[str, str]] = {}  # by name and node
    figures: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for report in reports:
        if (name := name_of(report.nodeid)) not in NAMED:
            continue
        known = outcomes.setdefault(name, {})
        if report.outcome != "passed" or report.when == "call" and report.nodeid not in known:
            known[report.nodeid] = report.outcome
        if report.when == "call":
            found = [value for key, value in report.user_properties if key == "figures"]
            figures.setdefault(name, {})[report.nodeid] = found
    out, held, seen = list[str](), 0, 0
    for fault, (title, _) in FAULTS.items():
        ends = [end for name in tests_of(fault) for end in outcomes.get(name, {}).values()]
        if not ends:
            continue
        seen += 1
        held += (good := "failed" not in ends and "passed" in ends)
        counts = " ".join(f"{ends.count(end)} {end}" for end in ("passed", "failed", "skipped") if end in ends)
        own = [one for name in tests_of(fault) for found in figures.get(name, {}).values() for one in found]
        out.append(f"{fault:4}{'held  ' if good else 'FAILED'} {title}: {counts} {write(own)}".rstrip())
    if out:
        every = [one for name in sorted(figures) for found in figures[name].values() for one in found]
        out.append(f"faults={held}/{seen} {write(every)}".rstrip())
    return out


def write(found: Iterable[Mapping[str, Any]]) -> str:
    """Return the figures in one line: numbers and "a/b" are added up, lists become p50 and max."""
    together: dict[str, list[Any]] = {}
    for one in found:
        for key, value in one.items():
            together.setdefault(key, []).append(value)
    return " ".join(text for key, values in together.items() for text in _written(key, values))


def _written(key: str, values: list[Any]) -> list[str]:
    if isinstance(values[0], list):
        numbers = [float(number) for one in values for number in one]
        if len(numbers) < 2:
            return [f"{key}={number:.2f}" for number in numbers]
        return [f"{key}_p50={statistics.median(numbers):.2f}", f"{key}_max={max(numbers):.2f}"]
    if isinstance(values[0], str):
        parts = [[int(number) for number in value.split("/")] for value in values]
        return [f"{key}={sum(a for a, _ in parts)}/{sum(b for _, b in parts)}"]
    return [f"{key}={sum(values):g}"]


def files() -> list[str]:
    """Return the paths of the files with tests of the table, from the root of the repository."""
    wanted = {test.partition("::")[0] for test in NAMED} | {"test_faults_table.py"}
    root = Path(__file__).parents[2]
    return sorted(str(path.relative_to(root)) for path in root.glob("tests/**/test_*.py") if path.name in wanted)


if __name__ == "__main__":
    print(*files())
