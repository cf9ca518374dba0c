"""The effort of the searches: numbers that trade planning time for better plans.

All of these numbers may be changed. They do not affect which plans are valid, or how the seconds
and bytes of a plan are counted. Other numbers give worse plans sooner, or better plans later.
`python -m experiments.planners.effort` plans recorded problems with ten times each number, and with
a tenth of it.

A "cell" is a pair of cuts between which a stage may lie; the number of cells is the work of a
search for cuts. "Tasks" are tasks that the simulator runs. A number without a unit is a count.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class CutEffort:
    """How many cuts the search by the surrogate considers (`cut_windows.py`, `trips.py`).

    A cap is an upper bound on the seconds of the slowest stage. The window of a bound is the cuts
    that are considered for it.

    Attributes:
        all_cells: if all cuts have at most this many cells, all cuts are considered.
        window_cells: if all cuts have more cells than `all_cells`, windows are narrowed
            until they have at most this many.
        trip_cells: the most cells that are considered when round trips must be kept short.
        cap_slacks: how far the cap may be above the least cap, as shares of the least cap; the
            first slack that leaves few enough cells is taken.
        near_caps: the caps under which `cap_search.py` looks for a first path, as multiples of the
            least caps; the first that some path keeps are taken.
        near_cap: the caps of the box that is opened first, as multiples of those of that path.
        transfer_factors: cuts with short round trips are searched once for each of these factors.
            The factor multiplies the seconds of transfers, because transfers wait for each other.
        spread_cells: windows with more cells than this are thinned out.
        spread_stages: how far a bound may be from where all stages would take equal seconds, when
            round trips must be kept short; the unit is the mean seconds of a stage.
        cap_tolerance: how near the least cap is found, as a share of it.
        trip_caps: the caps under which paths with short round trips are made, as multiples of the
            least cap; the last ones are for steps of few micro-batches.
        trip_weights: weights of the worst round trip (`share` in `trips.py`): shortening it by a
            second is worth this many seconds of the sum over stages.
        trip_tolerance: how near the least cap for round trips is found, as a share of it.
    """

    all_cells: int = 700_000
    window_cells: int = 120_000
    trip_cells: int = 300_000
    cap_slacks: tuple[float, ...] = (1.0, 0.4, 0.2, 0.1, 0.05, 0.02, 0.0)
    near_caps: tuple[float, ...] = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5)
    near_cap: float = 1.02
    transfer_factors: tuple[float, ...] = (1.0, 1.5)
    spread_cells: int = 2_000_000
    spread_stages: float = 8.0
    cap_tolerance: float = 1e-4
    trip_caps: tuple[float, ...] = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 1.7)
    trip_weights: tuple[float, ...] = (0.0, 0.5, 2.0)
    trip_tolerance: float = 1e-3


@dataclass(frozen=True)
class FateEffort:
    """How many choices of fates are followed side by side (`dominance.py` defines a state).

    Attributes:
        states: how many states a search for the fastest fates of a device keeps.
        few_states: how many states a search for the fewest bytes keeps at first.
        many_states: how many states that search keeps if it must be exact.
        overrun_price: the multiple of a byte's price that is charged for each byte by which a state
            will probably exceed the limit.
        near_best: a choice counts little in estimates if its cost exceeds that of its layer's
            cheapest choice by more than this share of the mean seconds of a layer.
    """

    states: int = 16
    few_states: int = 16
    many_states: int = 2000
    overrun_price: float = 5.0
    near_best: float = 0.01


@dataclass(frozen=True)
class LimitEffort:
    """How exactly the search decides whether a limit can be kept, and what the smallest limit is.

    Attributes:
        every_cut_layers: for models of at most this many layers, the search begins with the
            emptiest plan of every choice of cuts.
        plans: how many plans are lowered to see what they hold.
        plans_of_few: the same for models of at most `every_cut_layers` layers.
        held_times: a further plan is lowered if its bytes, by the planners' count, are at most this
            many times those of the emptiest plan. Its exact bytes may be fewer.
        exact_layers: models of more layers get a limit that suffices, near the smallest one.
        rounds_with_plan: for models of more than `exact_layers` layers, a search for the smallest
            limit ends after this many rounds if it has found a plan.
        rounds_without_plan: for these models, the search ends after this many rounds in any case.
        tolerance: for these models, how near the smallest limit is found, as a share of it.
        all_cells: if all cuts have at most this many cells, all are considered.
        cuts: if there are at most this many choices of cuts, each is considered.
        moved_cuts: if there are more than `cuts`, bounds move one at a time from each start, and
            at most this many choices of cuts are considered.
    """

    every_cut_layers: int = 16
    plans: int = 60
    plans_of_few: int = 600
    held_times: float = 1.05
    exact_layers: int = 128
    rounds_with_plan: int = 3
    rounds_without_plan: int = 60
    tolerance: float = 1e-3
    all_cells: int = 1_000_000
    cuts: int = 1_000
    moved_cuts: int = 100


@dataclass(frozen=True)
class OrderEffort:
    """How many orders of tasks are tried if the order is open (`schedule="auto"`).

    Attributes:
        farthest: the most tasks that one task passes in a move.
        moves: how many moves are compared before one is made.
        gainless: a climb ends after this many moves without a gain.
        blocked: a turn in which no move is possible counts as this many moves without a gain.
        rest: a task that has moved rests for at least this many moves, and for fewer than twice as
            many.
        all_cuts: if a placement has at most this many choices of cuts, all are tried.
        in_flight: before list scheduling, fates are chosen that leave room for each of
            these numbers of micro-batches in flight on a device's first stage.
        caps: list scheduling is tried with room on each device for this many micro-batches times
            the number of devices. Under a limit, only rooms below the real one are tried, and then
            the real one.
        simulated: how many refined orders are simulated.
        crowded: how many further candidates are simulated if transfers share links. The times of
            `order_course.py` leave out the waits of such transfers for each other.
        polished: how many of the simulated plans are the starts of climbs that simulate each order
            (`order_polish.py`).
        polished_tasks: how many tasks each of these climbs may simulate.
        doubt: a plan is chosen over 1F1B only if it is faster by this share times `Problem.lent`,
            the share of idle time that other devices can use. If devices share workers, measured
            seconds are uncertain.
    """

    farthest: int = 6
    moves: int = 30
    gainless: int = 100
    blocked: int = 5
    rest: int = 8
    all_cuts: int = 100
    in_flight: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    caps: tuple[float, ...] = (1.5, 2.0, 3.0)
    simulated: int = 3
    crowded: int = 24
    polished: int = 16
    polished_tasks: int = 10_000
    doubt: float = 0.1


@dataclass(frozen=True)
class RuleEffort:
    """How much is tried under a rule with several stages per device, or with split backwards.

    A rule is a schedule that fixes the order of tasks.

    Attributes:
        moved_tasks: the tasks simulated while the bounds of a plan move and its order stays.
        simulated_tasks: the tasks simulated while bounds move under a rule.
        around: how many neighbors of the best plan under a rule are climbed from too.
        few_layers: more is tried for models of at most this many layers.
        refined_layers: for models of more layers, plans of one stage per device are the
            surrogate's best, and are not simulated to improve them.
    """

    moved_tasks: int = 30_000
    simulated_tasks: int = 300_000
    around: int = 6
    few_layers: int = 96
    refined_layers: int = 256


@dataclass(frozen=True)
class PlanEffort:
    """How many plans of one stage per device are simulated.

    Attributes:
        hasty_layers: models of more layers are planned with less effort.
        near_limit: if the surrogate's plan without a limit takes at most this many times the limit,
            the simulated plan without a limit is tried too.
        paths: how many of the surrogate's best cuts are simulated.
        tasks: how many tasks are simulated in all.
        clocked: the most tasks, over all neighbors, whose seconds are bounded at once
            (`least_steps_s`).
        clocked_for_one: how many bounded tasks cost as much effort as one simulated task.
        imbalance: for models of more than `hasty_layers` layers, swaps are tried if the
            slowest stage takes more than this many times its even share of the work.
        host_crowding: the factor by which the surrogate slows down the link to the host. If the
            link is never idle, devices wait even for transfers that the surrogate counts as
            hidden. These waits take up to half of a simulated step.
        swap_price: for models of more than `hasty_layers` layers, a swap's seconds count as work by
            this share; with more, fates recompute what they could swap.
        places: the most cuts by which a bound moves under a limit.
        stride: for models of more than `hasty_layers` layers, the distances by which bounds move
            grow by this factor.
        shifted: how many plans whose stages move to the next device are tried in a round.
        starts: how many plans are climbed from.
        near_start: a start that takes at most this many times the fastest start's seconds is
            climbed from before the neighbors of the best plan.
        neighbors: how many neighbors of a plan are simulated to find the one to climb from.
        single_fate_layers: the fates of single layers are changed for models of at most this many
            layers.
        device_orders: if devices differ and have at most this many orders, all orders are tried.
        searched_orders: how many orders of devices get a whole search.
    """

    hasty_layers: int = 256
    near_limit: float = 1.2
    paths: int = 6
    tasks: int = 300_000
    clocked: int = 2_000_000
    clocked_for_one: int = 16
    imbalance: float = 1.01
    host_crowding: float = 3.0
    swap_price: float = 0.002
    places: int = 3
    stride: float = 1.15
    shifted: int = 100
    starts: int = 4
    near_start: float = 1.3
    neighbors: int = 24
    single_fate_layers: int = 64
    device_orders: int = 12
    searched_orders: int = 2


@dataclass(frozen=True)
class ShapeEffort:
    """How many shapes of a pipeline are tried: devices of each place, and sizes of micro-batches.

    A path is a shape with the bounds of its stages (`shape_search.py`).

    Attributes:
        sizes: how many micro-batch sizes are searched thoroughly.
        glances: how many sizes are glanced at, to find those to search.
        glance_cuts: how many cuts a glance uses.
        glance_units: into how many units a glance divides the devices.
        glance_stages: the most stages of a path in a glance.
        units: into how many units the devices are divided; a stage has one or more whole units.
        stages: the most stages of a path.
        rounds: how many times paths are searched, each time with the seconds of the best plan's
            slowest stage as a floor; and how many rounds of climbs follow.
        paths: how many paths are simulated for each size.
        climbs: the most steps of a climb.
        neighbors: how many neighbors of a plan are simulated in each step of a climb.
        starts: how many shapes are climbed from, besides the best of each kind.
        worth_a_climb: plans that take at most this many times the fastest start's seconds are
            climbed from.
        planned: the most shapes that are planned exactly.
        worth_a_plan: shapes that take at most this many times the best shape's seconds are planned
            exactly; if the best shape recomputes layers, this number is ignored.
        microbatches: how many micro-batches per stage of a rough plan are simulated; each further
            one is assumed to add the same seconds.
        few_tasks: plans with at most this many forwards are simulated rather than estimated.
        bisections: how many halvings find the lower bound of a step's seconds.
    """

    sizes: int = 3
    glances: int = 16
    glance_cuts: int = 14
    glance_units: int = 8
    glance_stages: int = 5
    units: int = 16
    stages: int = 32
    rounds: int = 3
    paths: int = 16
    climbs: int = 12
    neighbors: int = 6
    starts: int = 4
    worth_a_climb: float = 1.3
    planned: int = 3
    worth_a_plan: float = 1.005
    microbatches: int = 4
    few_tasks: int = 32
    bisections: int = 16


CUTS = CutEffort()
FATE = FateEffort()
LIMIT = LimitEffort()
ORDER = OrderEffort()
RULE = RuleEffort()
PLAN = PlanEffort()
SHAPE = ShapeEffort()
