"""How hard the searches try: every number that trades planning time for better plans, by search.

None of them decides what is a plan, or what it takes: with other numbers the same problems are
answered, sooner and worse or later and better. `python -m experiments.planners.effort` plans
recorded problems with ten times as much of each, and with a tenth of it.

"Cells" are pairs of a place to begin a stage and a place to end it: the work of a search between
cuts. "Tasks" are those that the simulator runs. "Layers" and "steps" (of the simulator) are counts,
and so is what has no unit.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class CutEffort:
    """How many cuts the surrogate looks at.

    Attributes:
        all_cells: the most cells of all cuts for these to be looked at.
        window_cells: the most cells of the cuts that matter, else.
        trip_cells: the most cells between which round trips over slow links are counted.
        cap_slacks: by how much the slowest stage may be above the least that is possible, as shares
            of it; the first that leaves few enough cells is taken.
        transfer_factors: how many times longer a transfer is taken to be, for it waits for others.
        spread_cells: the most cells between windows that are spread where links are slow.
        spread_stages: how many mean stages a bound may then be away from its even share.
        prices_tolerance: how near the least cap must be to find prices of bytes and seconds there,
            as a share of it.
        trip_caps: multiples of the least cap under which round trips are evened out; the last are
            for steps of few micro-batches.
        trip_weights: what a second is worth that a group of stages could still take, in seconds of
            the sum.
        trip_tolerance: how near the least cap is found, as a share of it.
    """

    all_cells: int = 700_000
    window_cells: int = 120_000
    trip_cells: int = 300_000
    cap_slacks: tuple[float, ...] = (1.0, 0.4, 0.2, 0.1, 0.05, 0.02, 0.0)
    transfer_factors: tuple[float, ...] = (1.0, 1.5)
    spread_cells: int = 2_000_000
    spread_stages: float = 8.0
    prices_tolerance: float = 1e-2
    trip_caps: tuple[float, ...] = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 1.7)
    trip_weights: tuple[float, ...] = (0.0, 0.5, 2.0)
    trip_tolerance: float = 1e-3


@dataclass(frozen=True)
class FateEffort:
    """How many ways to treat what layers leave are followed side by side.

    Attributes:
        states: of a device whose layers are looked at all at once.
        few_states: of the search for the fewest bytes, at first.
        many_states: of that search where it is to be exact.
        overrun_price: by how many times its price a byte is charged if a state will probably exceed
            the limit by it.
        near_best: how near a choice must be to the best to be expected too, as a share of an even
            part of a layer.
    """

    states: int = 16
    few_states: int = 16
    many_states: int = 2000
    overrun_price: float = 5
    near_best: float = 0.01


@dataclass(frozen=True)
class LimitEffort:
    """How closely it is decided whether a limit can be kept, and which one could be.

    Attributes:
        every_cut_layers: of models of so many layers the emptiest plans begin at all cuts.
        plans: that are lowered to see what they hold.
        plans_of_few: the same of models of few layers.
        held_times: how many times what a plan holds may be counted for one that holds less.
        exact_layers: for models of more layers the limit is one that would do, near the smallest.
        rounds_with_plan: after so many rounds the best plan of such a model is taken.
        rounds_without_plan: after so many none is looked for.
        tolerance: how near the limit of such a model is found, as a share of it.
        all_cells: up to so many, the cells of all cuts are looked at.
        cuts: up to so many, each of them is looked at; of several stages per device, all.
        moved_cuts: so many are looked at where there are more of these.
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
    """How many orders of tasks are looked at where the order is open.

    Attributes:
        farthest: tasks that another one passes at most in a move.
        moves: that are compared before one is made.
        gainless: moves without a gain after which a climb ends.
        blocked: moves without a gain that a longest path without a move counts for.
        rest: moves for which a task that has moved rests at least; at most it is twice as many.
        all_cuts: cuts of a placement up to which all are begun with.
        in_flight: micro-batches of a device's first stage that fates make room for, where list
            scheduling follows.
        caps: micro-batches in flight per device, over the number of devices, in list scheduling:
            those that leave room under a limit, and what room there is.
        patiences: of list scheduling.
        simulated: refined orders that are simulated.
        crowded: candidates that are simulated where transfers share links, of which the clock does
            not know.
        doubt: the share of what devices lend by which a plan has to be faster than 1F1B: what
            measured seconds of programs are off by where devices share workers is more than any
            order saves there.
    """

    farthest: int = 6
    moves: int = 30
    gainless: int = 100
    blocked: int = 5
    rest: int = 8
    all_cuts: int = 100
    in_flight: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    caps: tuple[float, ...] = (1.5, 2.0, 3.0)
    patiences: tuple[float, ...] = (0.0, 1.0)
    simulated: int = 3
    crowded: int = 24
    doubt: float = 0.1


@dataclass(frozen=True)
class RuleEffort:
    """How much is tried under a schedule's rule with several stages per device, or with backwards
    in halves.

    Attributes:
        moved_tasks: that are simulated while the bounds of a plan move in its own order.
        simulated_tasks: while those of plans under a rule do.
        around: neighbours of the best plan under a rule that are climbed from too.
        few_layers: of a model of which more is tried.
        refined_layers: of models of more layers the plan of one stage per device is the
            surrogate's.
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
        hasty_layers: models of more layers are planned in haste.
        near_limit: how many times the limit the surrogate's plan of no limit may take where the
            simulated one is asked for.
        paths: of the surrogate's best cuts that are simulated.
        tasks: that are simulated in all.
        clocked: tasks of neighbours that are clocked at once.
        clocked_for_one: so many of them are worth one that is simulated.
        noticed_link: where links take more than this share of the work's seconds, round trips are
            looked at.
        imbalance: how many times longer than its even share of the work the slowest stage takes
            where more is sought.
        host_crowding: how many times slower the link to the host is taken to be. A link that is
            never idle keeps others waiting: what the surrogate takes for hidden costs up to half of
            a step, simulated.
        places: by which a bound moves at most under a limit.
        shifted: plans whose stages move on to the next device that are looked at in a round.
        starts: plans that are climbed from.
        near_start: how many times longer than the fastest of them others may take that are climbed
            from before its neighbours.
        neighbours: of a plan that are simulated to find the one to climb from.
        single_fate_layers: of a model whose fates are changed one by one.
        device_orders: of unlike devices that can stand in so many orders at most, all are looked
            at.
        searched_orders: those that are worth a whole search.
    """

    hasty_layers: int = 256
    near_limit: float = 1.2
    paths: int = 6
    tasks: int = 300_000
    clocked: int = 2_000_000
    clocked_for_one: int = 16
    noticed_link: float = 0.02
    imbalance: float = 1.01
    host_crowding: float = 3.0
    places: int = 3
    shifted: int = 100
    starts: int = 4
    near_start: float = 1.3
    neighbours: int = 24
    single_fate_layers: int = 64
    device_orders: int = 12
    searched_orders: int = 2


@dataclass(frozen=True)
class ShapeEffort:
    """How many shapes of a pipeline are looked at: devices of each place, and sizes of
    micro-batches.

    Attributes:
        sizes: micro-batch sizes that are searched well.
        glances: sizes that are glanced at, to find these.
        glance_cuts: between so many cuts.
        glance_units: with devices in so many units.
        glance_stages: for so many stages at most.
        units: of devices that stages of many devices consist of.
        stages: that a path may have.
        rounds: of paths, each with what the slowest stage of the best plan takes for granted.
        paths: that are simulated.
        climbs: steps of a climb.
        neighbours: of a plan that are simulated for each step.
        starts: shapes that climb, besides the best of each kind.
        worth_a_climb: how many times slower than the best a plan may be that climbs.
        planned: shapes that are planned exactly at most.
        worth_a_plan: how many times slower than the best one they may be, if that keeps everything.
        microbatches: per stage, that a rough plan is simulated for; the others are as far apart.
        few_tasks: forwards up to which a plan is simulated rather than estimated.
        bisections: by which the seconds that no step is below are found, of those of the model.
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
    neighbours: int = 6
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
