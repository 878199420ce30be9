"""When to use which norm: the advice of docs/results.md by m and net, with the figures that it rests on.

Each line comes from records. Where its condition no longer holds, the script ends with an error that names the line.
"""

from __future__ import annotations

import results_evidence as evidence
import results_filters as filters
import results_lab as lab
import results_small
import results_table3 as table3
import results_trials as trials
from measured import markdown
from results_lab import SmallForm, above, cifar, digits, small
from results_words import bullets, difference, mean, paragraph, said, signed, standard_error

from trials.evidence import TABLE3
from trials.forms import Form
from trials.table import HELD_OUT


def chosen(cell: str, kind: str, m: int, *, phase: bool = True) -> float:
    """The held-out accuracy of the best setting."""
    score = trials.best(cell, kind, m, phase=phase)
    assert score is not None, (cell, kind, m, phase)
    return score.first


def error_of_a_difference(cell: str) -> float:
    """The standard error of the difference of two runs, from the number of held-out images alone."""
    return 2**0.5 * standard_error(trials.at(cell, Form(kind="batch")), HELD_OUT)


def ghost_below(cell: str, m: int = 2) -> float:
    """How far batch norm on groups is below BKN, both with a closing phase, each at its best setting."""
    return chosen(cell, "kalman", m) - chosen(cell, "ghost", m)


def of_rates(batch: int) -> str:
    """Moving Average Batch Norm and BKN in true batches, at both learning rates."""
    forms = {"Moving Average Batch Norm": SmallForm("mabn"), "BKN by the recipe": SmallForm("bkn-ws", 0.02)}
    told = []
    for name, form in forms.items():
        low, high = (mean(lab.small_on_cifar(form._replace(rate=rate), batch)) for rate in (1.0, lab.HIGHER))
        told.append(said(f"{name} has {low:.1f} % at one rate and {high:.1f} % at {lab.HIGHER:g} times it", high > low))
    return ", and ".join(told)


def _of_recipe(cell: str, m: int) -> list[str]:
    """The row of the recipe on a data set."""
    found = {kind: filters.differences(cell, kind).get(m) for kind in ("plain", "standardized")}
    told = [f"{each.shown(2)} with {kind} filters" for kind, each in found.items() if each is not None]
    ours = f"the recipe against batch norm at 128: {', '.join(told)}, {max(filters.seeds(cell))} seeds"
    return [str(m), f"{trials.NAMES[cell]}, test", ours + _beside_the_recipe(cell, m), _advice(cell, m)]


def _held(cell: str, m: int) -> dict[str, float]:
    """BKN and groups on held-out images with standardized filters, each at its best phase. Empty: not run."""
    found = {name: filters.held(cell, kind, m) for name, kind in (("BKN", "kalman"), ("groups", "ghost"))}
    known = {name: each for name, each in found.items() if each is not None}
    return known if len(known) == len(found) else {}


def _beside_the_recipe(cell: str, m: int) -> str:
    """Other norms: on test images where they were run, and groups else on held-out images."""
    found = filters.others(cell, m)
    text = "".join(f"; {name} {each.shown(2)} points against BKN" for name, each in found.items())
    if filters.GROUPED in found:
        return text
    held = ", ".join(f"{name} {each:.1f}" for name, each in _held(cell, m).items())
    if (pair := _by_size(cell, m)) is not None:
        text += f"; both by the recipe, one seed of `sizes`, test: BKN {pair[0]:.1f}, groups {pair[1]:.1f} %"
    return (
        f"{text}; groups only held out, with these filters, seed 0, each at its best phase: {held} %" if held else text
    )


def _by_size(cell: str, m: int) -> tuple[float, float] | None:
    """BKN and batch norm on groups, both by the recipe, in the round `sizes`: on test images, one seed."""
    found = evidence.tested(cell)
    ours, groups = (found.get((f"{norm}, recipe", m)) for norm in ("BKN", "groups"))
    return None if ours is None or groups is None else (ours, groups)


def _near(held: dict[str, float]) -> bool:
    return abs(held["BKN"] - held["groups"]) < 2**0.5 * standard_error(held["BKN"], HELD_OUT)


def _advice(cell: str, m: int) -> str:
    """What is the best on test images. BKN is not, if groups cannot be told from it: they are simpler."""
    recipe, found, held = "[the recipe](recipe.md)", filters.others(cell, m), _held(cell, m)
    better = {name: each.points for name, each in found.items() if each.above}
    if better:
        name = max(better, key=better.__getitem__)
        return f"{name}, with the filters and the phase of {recipe}" if name == filters.GROUPED else name
    grouped = found.get(filters.GROUPED)
    pair = _by_size(cell, m)
    near = pair is not None and abs(pair[0] - pair[1]) < error_of_a_difference(cell)
    if m == 1 and grouped is None and near and not better:
        return f"BKN by {recipe}, or batch norm on groups by it (one seed), which is simpler"
    if m == 2 and (not grouped.below if grouped else held and _near(held)):
        return f"{recipe}, with either norm; batch norm on groups is simpler"
    said(f"BKN by {recipe}", bool(grouped) or not held or held["BKN"] > held["groups"])
    open_ = [name for name, each in found.items() if name != filters.GROUPED and each.open]
    advice = " or ".join([f"BKN by {recipe}", *open_])
    if not grouped and held and _near(held):
        advice += ". Batch norm on groups with its filters may be as good: it was not run on test images"
    return advice


def _in_one_line() -> str:
    """The table of advice, in short."""
    nets = [evidence.tested(cell) for cell in ("cifar10", "cifar10-resnet32")]
    lost = [signed(found["groups", 4] - found["groups", 128]) for found in nets]
    tiny = signed(chosen("tiny100", "ghost", 4, phase=False) - trials.at("tiny100", Form(kind="batch")))

    small = evidence.tested("tiny100")
    tiny_8 = signed(small["BKN, closing phase", 8] - small["groups", 8])

    def ahead(m: int) -> str:
        return " and ".join(signed(found["BKN", m] - found["groups", m]) for found in nets)

    return bullets(
        [
            said(
                "**m = 8 or more:** batch norm on the groups, by [the recipe](recipe.md) if you train from scratch. At "
                f"m = 8 BKN has {ahead(8)} points against plain batch norm on the groups (two nets on CIFAR-10, one "
                f"seed). With a closing phase it has {tiny_8} on Tiny-ImageNet (one seed).",
                min(found["BKN", 8] - found["groups", 8] for found in nets) < 0,
            ),
            said(
                "**m = 4:** batch norm on groups by the recipe (three data sets, 3 seeds). With plain filters BKN has "
                f"{ahead(4)} points against batch norm on the groups (two nets on CIFAR-10, one seed). Plain batch "
                f"norm on groups of 4 has {lost[0]} and {lost[1]} points against batch norm at 128 there, and {tiny} "
                "on Tiny-ImageNet (held out, one seed). On digits it loses nothing.",
                all(found["BKN", 4] > found["groups", 4] for found in nets),
                mean(digits("BN", 4, "population")) >= mean(digits("BN", 64, "population")),
            ),
            *(
                f"**m = {m}:** {told}.{table3.beside_groups() if m == 2 else ''}"
                for m in (2, 1)
                if (told := _by_data_set(m))
            ),
            "**Fine-tuning at m = 2 and 1, in batches of 64 or 32 images:** a [closing "
            "phase](statistics.md#the-closing-phase) with `present=0.5`. On other classes BKN was better, on the same "
            "data either norm.",
            "**Optimizer steps of 1, 2 or 4 images:** Moving Average Batch Norm. In batches of 4, BKN by the recipe "
            "could not be told from it. Choose the learning rate for each. (BKN had a gain from 0.5 there, also at "
            "m = 1.)",
            f"**Any m, if the net need not be folded:** also try group norm with standardized weights ({_of_gn_ws()}).",
        ]
    )


def _with_plain_filters() -> str:
    """BKN beside batch norm on the same groups, by m."""
    lines = evidence.beside_groups()
    if not lines:
        return ""
    words = paragraph(
        "With plain filters: test accuracy in %, `population` inference, 15 epochs, one seed. Held-out images choose "
        "whether a norm has a closing phase. Then *use* is BKN if it is better by more than two standard errors of the "
        "test images. Otherwise it is batch norm on groups. Runs that diverged have the early phase of groups (below). "
        "On Tiny-ImageNet the weight decay is 1e-3, which was the best for batch norm; for BKN 2e-3 was better:"
    )
    headings = ["m", "net and images", "BKN", "BKN, closing phase", "batch norm on groups"]
    headings += ["batch norm on groups, closing phase", "use"]
    return words + "\n" + "\n".join(markdown(headings, lines, 2)) + "\n\nOther measurements:\n\n"


def _of_gn_ws() -> str:
    """Group norm with standardized weights beside batch norm at 128."""
    nets = {"CIFAR Inception": evidence.tested("cifar10"), "ResNet-32": evidence.tested("cifar10-resnet32")}
    told = [f"{signed(found['standardized', 1] - found['groups', 128])} with {net}" for net, found in nets.items()]
    ten, hundred = (table3.after_long_runs("group norm with standardized weights", data=data) for data in table3.DATA)
    tiny = evidence.tested("tiny100")
    more = signed(tiny["standardized", 1] - tiny["groups", 128])
    return (
        f"against batch norm at 128 on CIFAR-10 {' and '.join(told)} after 15 epochs, one seed, and {ten} after 30; on "
        f"CIFAR-100 {hundred} after 30; on Tiny-ImageNet {more}, one seed"
    )


def _by_data_set(m: int) -> str:
    """The advice of the recipe's nets, each with its data sets."""
    found: dict[str, list[str]] = {}
    for cell in trials.cells(test=True):
        if m in filters.differences(cell):
            found.setdefault(_advice(cell, m), []).append(trials.SHORT[cell])
    return ". ".join(f"{' and '.join(cells)}: {advice}" for advice, cells in found.items())


PHASE_OF_GROUPS = Form(kind="ghost", m=2, closing=True, means="average", close=(0.05, 0.35))


def _of_phases() -> list[str]:
    """That the advice for CIFAR-100 at m = 2 holds for one phase."""
    bkn, groups = (filters.held("cifar100", kind, 2) for kind in ("kalman", "ghost"))
    if bkn is None or groups is None or "cifar100" not in trials.cells(test=True):
        return []
    return [
        "On CIFAR-100 at m = 2 the advice is for the phase of the recipe. With the best phase for each on held-out "
        f"images, BKN has {bkn:.1f} and batch norm on groups {groups:.1f} % (one seed, from 0 to 2 % of the training)."
    ]


def _of_plain_phases() -> str:
    """Which closing phases plain filters have, and how often runs with them diverged."""
    early, late = PHASE_OF_GROUPS.close, TABLE3[table3.CLOSED].close
    best = trials.best("cifar10", "ghost", 2, phase=True)
    assert best is not None
    start, end = (f"{100 * share:.0f}" for share in best.setting.form.close)
    counts = [evidence.diverged(kind, close) for kind, close in (("ghost", early), ("ghost", late), ("kalman", late))]
    groups, with_late, ours = (f"{count} of {total}" for count, total in counts)
    return (
        "The closing phases with plain filters differ: BKN from 30 to 60 % of the training, groups from 5 to 35 %, as "
        f"trials on Tiny-ImageNet chose. With 5 to 35 % groups diverged in {groups} runs of `sizes` and `table3`, with "
        f"30 to 60 % in {with_late}. BKN, with 30 to 60 %, diverged in {ours}. On CIFAR-10 trials chose a later phase "
        f"for groups of 2 ([{start} to {end} %](trials.md)), which was not run here."
    )


def when() -> str:
    """Advice by m and net, with the figures that it rests on."""
    tiny, inception = "ResNet-18, Tiny-ImageNet, held out", "CIFAR Inception, CIFAR-10, held out"
    bkn, bn = "BKN weights", "BN"
    large = above(digits, 64, "population")
    eight = [above(digits, m, "population") for m in (32, 8)]
    four = above(digits, 4, "population")
    plain = trials.at("tiny100", Form(kind="kalman")) - trials.at("tiny100", Form(kind="batch"))
    at_one = {cell: (chosen(cell, "kalman", 1), chosen(cell, "ghost", 1)) for cell in ("tiny100", "cifar10")}
    tuned = {
        (net, m): difference(
            lab.tuned(net, "BKN, calibrated, closing phase, present 0.5", m),
            lab.tuned(net, "batch norm, closing phase, present 0.5", m),
        )
        for net in ("digits-net", "small-resnet-20")
        for m in (2, 1)
    }
    at_32 = lab.transferred("batch norm", 32)
    other = lab.present_on_other_data(at_32)
    ahead = [difference(*(lab.transferred(form, m) for form in lab.PRESENT)) for m in (2, 1)]
    bkn_2, bkn_1 = small(SmallForm("bkn"), 2), small(SmallForm("bkn", 0.3, 0.1), 1)
    moving_2, moving_1 = (small(SmallForm("mabn"), batch) for batch in (2, 1))
    rows = [
        [
            "128",
            tiny,
            said(f"BKN {signed(plain)} points against batch norm, one seed", plain < 0),
            "batch norm",
        ],
        [
            "64",
            "digits-net, digits, test",
            said(
                f"BKN {large.shown()} points against batch norm, {len(digits(bkn, 64, 'population'))} seeds",
                large.points < 0,
            ),
            "batch norm",
        ],
        [
            "8, 32",
            "digits-net, digits, test",
            said(
                f"BKN {signed(eight[1].points)} and {signed(eight[0].points)} points, "
                f"{len(digits(bn, 8, 'population'))} seeds",
                all(each.points <= 0 for each in eight),
            ),
            "batch norm on the groups",
        ],
        [
            "4",
            tiny,
            said(
                f"plain filters, one seed: batch norm on groups {chosen('tiny100', 'ghost', 4, phase=False):.1f}, with "
                f"a closing phase {chosen('tiny100', 'ghost', 4):.1f} %; batch norm at 128 "
                f"{chosen('tiny100', 'batch', 128, phase=False):.1f} %. BKN was not run",
                trials.best("tiny100", "kalman", 4, phase=True) is None,
                chosen("tiny100", "ghost", 4) > chosen("tiny100", "ghost", 4, phase=False),
            ),
            "batch norm on groups, with a closing phase",
        ],
        [
            "4",
            "digits-net, digits, test",
            said(f"BKN {four.shown()} points against plain groups", four.points < 0),
            "batch norm on the groups",
        ],
        *filters.larger_groups(),
        *(_of_recipe(cell, 2) for cell in trials.cells(test=True) if 2 in filters.differences(cell)),
        [
            "2",
            f"{inception}; {tiny}",
            said(
                f"plain filters, closing phase: BKN {chosen('cifar10', 'kalman', 2):.1f} and "
                f"{chosen('tiny100', 'kalman', 2):.1f}, groups {chosen('cifar10', 'ghost', 2):.1f} and "
                f"{chosen('tiny100', 'ghost', 2):.1f} %, one seed, each at its best of several settings. The second "
                f"difference is within its standard error of {error_of_a_difference('tiny100'):.1f} points",
                ghost_below("cifar10") > 2 * error_of_a_difference("cifar10"),
                abs(ghost_below("tiny100")) < error_of_a_difference("tiny100"),
            ),
            "if filters must stay plain: BKN with a closing phase, or batch norm on groups, which is simpler",
        ],
        *table3.advice(),
        *(_of_recipe(cell, 1) for cell in trials.cells(test=True) if 1 in filters.differences(cell)),
        [
            "1",
            f"{inception}; {tiny}",
            said(
                f"plain filters, closing phase: BKN {at_one['cifar10'][0]:.1f} and {at_one['tiny100'][0]:.1f}, groups "
                f"{at_one['cifar10'][1]:.1f} and {at_one['tiny100'][1]:.1f} %, one seed. Groups of 1 had one setting "
                "only, BKN many. With one setting for both there is no clear difference on Tiny-ImageNet (table above)",
                evidence.near("tiny100", 1),
                all(ours > theirs + 2 for ours, theirs in at_one.values()),
            ),
            "if filters must stay plain: BKN with a closing phase",
        ],
        [
            "2, 1",
            "fine-tuning of digits-net and small-resnet-20, test",
            said(
                f"closing phase, `present=0.5`: BKN {signed(min(d.points for d in tuned.values()))} to "
                f"{signed(max(d.points for d in tuned.values()))} points against groups, every interval contains 0",
                all(abs(each.points) <= (each.half or 0) for each in tuned.values()),
            ),
            "batch norm on groups, with a closing phase and `present=0.5`",
        ],
        [
            "2, 1",
            "fine-tuning of a ResNet-20 on other classes of CIFAR-10, test",
            said(
                f"closing phase, `present=0.5`, against batch norm at 32: BKN {other['BKN', 2].shown()} and "
                f"{other['BKN', 1].shown()} points; against groups {ahead[0].shown()} and {ahead[1].shown()} points, "
                f"{len(at_32)} seeds",
                all(each.above for each in ahead),
                not any(other["BKN", m].below for m in (2, 1)),
            ),
            "BKN, calibrated as `convert` does for trained weights, with a closing phase and `present=0.5`",
        ],
        [
            "2",
            "digits-net, true batches of 2, test",
            said(
                f"BKN {mean(bkn_2):.1f}, Moving Average Batch Norm {mean(moving_2):.1f} %, {len(bkn_2)} seeds",
                abs(mean(bkn_2) - mean(moving_2)) < 1,
            ),
            "BKN or Moving Average Batch Norm",
        ],
        [
            "1",
            "digits-net, true batches of 1, test",
            said(
                f"Moving Average Batch Norm {mean(moving_1):.1f}, BKN with a gain from 0.1 and a closing phase "
                f"{mean(bkn_1):.1f} %, {len(bkn_1)} seeds",
                not difference(bkn_1, moving_1).below,
            ),
            "Moving Average Batch Norm, or BKN with `gain=0.1` and a closing phase",
        ],
        *(
            [
                str(batch),
                f"ResNet-20 on a part of CIFAR-10, true batches of {batch}, test",
                f"{of_rates(batch)}, one seed",
                "BKN by [the recipe](recipe.md) or Moving Average Batch Norm, after a choice of the learning rate",
            ]
            for batch in (2, 1)
        ),
        *results_small.ahead(),
    ]
    scratch = next(number for number, row in enumerate(rows) if "fine-tuning" in row[1])
    rows[:scratch] = sorted(rows[:scratch], key=lambda row: -int(row[0].split(", ")[-1]))
    text = _in_one_line() + "\n" + _with_plain_filters()
    text += "\n".join(markdown(["m", "net and images", "measured, `population` inference", "use"], rows, 4)) + "\n\n"
    warmed = cifar("GN warmed up", 128, "population")
    against_two, against_bkn = (difference(warmed, cifar(method, 2, "population")) for method in (bn, bkn))
    long = [table3.after_long_runs("group norm", name) for name in ("batch norm (128, 2)", "BKN (128, 2)")]
    return text + bullets(
        [
            said(
                "Group norm needs no groups of examples. After 8 epochs of CIFAR-10 we cannot tell it from plain batch "
                f"norm at m = 2 ({against_two.shown()} points, 3 seeds), and it is {against_bkn.size()} points below "
                f"BKN at m = 2. After 30 epochs it has {long[0]} against plain batch norm at m = 2, and {long[1]} "
                "against BKN. It had one learning rate.",
                against_two.open and against_bkn.below,
            ),
            *_of_phases(),
            _of_plain_phases(),
            said(
                "Batch norm at 128 was not run with standardized filters and a closing phase. So what the recipe gains "
                "over it includes the effect of the phase.",
                not evidence.phase_at_128_ran(),
            ),
        ]
    )
