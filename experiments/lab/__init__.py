"""Code that all experiments share: flags, run folders, chunks of seeds, tables, figures."""

from experiments.lab.devices import (
    count_cores as count_cores,
    has_accelerator as has_accelerator,
)
from experiments.lab.executor import (
    SEEDS as SEEDS,
    Chunk as Chunk,
    Executor as Executor,
    Mapped as Mapped,
)
from experiments.lab.experiment import (
    Experiment as Experiment,
    describe_experiment as describe_experiment,
    describe_figures as describe_figures,
    import_experiment as import_experiment,
    list_experiments as list_experiments,
    read_run as read_run,
)
from experiments.lab.flags import (
    Flags as Flags,
    FlagValue as FlagValue,
    Mode as Mode,
    check_names as check_names,
    content_hash as content_hash,
    make_config as make_config,
    read_flags as read_flags,
)
from experiments.lab.folder import RunFolder as RunFolder
from experiments.lab.folder_files import (
    read_config as read_config,
    read_rows as read_rows,
    read_summary as read_summary,
    table_bytes as table_bytes,
)
from experiments.lab.grid import (
    Options as Options,
    list_points as list_points,
)
from experiments.lab.progress import (
    Progress as Progress,
    report_activity as report_activity,
    stop_requested as stop_requested,
)
from experiments.lab.provenance import JsonObject as JsonObject
from experiments.lab.rounds import extend_part as extend_part
from experiments.lab.run import (
    Finding as Finding,
    Point as Point,
    Run as Run,
    open_run as open_run,
)
