"""The Lightning strategy: Lightning's hooks, each a few lines that call the parts.

It refuses configurations that cannot work before any process group exists, and manual optimization where a schedule
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.features import parts
from lightning_mm5d.config.groups import (
    FIELDS,
    OBJECTS,
    BatchingOptions,
    CheckpointOptions,
    LaunchOptions,
    NumericsOptions,
    fields_of_strategy,
    option_values,
)
from lightning_mm5d.config.modality import Modality, as_modalities, for_schedule, loss_modality_of
from lightning_mm5d.config.options import BACKENDS
from lightning_mm5d.data.loader import group_batches, per_replica, shard_loader
from lightning_mm5d.data.random_state import packed_state
from lightning_mm5d.data.replica_view import as_replica, seen_replica
from lightning_mm5d.gradients.gradients import skipped
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import AnySchedule, Simulation, check_fields, loaded
from lightning_mm5d.trainer.checkpoint_strategy import CheckpointStrategy
from lightning_mm5d.trainer.construction import configured, is_configured, try_configured
from lightning_mm5d.trainer.feature import made_features
from lightning_mm5d.trainer.kept_shards import kept_plan, refuse_other_processes
from lightning_mm5d.trainer.launch import ProcessLauncher
from lightning_mm5d.trainer.process_strategy import required
from lightning_mm5d.trainer.replica_collectives import DataloaderHooks, ReplicaCollectives, put_in_no_sampler
from lightning_mm5d.trainer.session import RunOptions, Session
from lightning_mm5d.trainer.statements import layout_fields, loader, optimizers, structure
from lightning_mm5d.trainer.validation import (
    batch_sizes,
    check_backend,
    check_batches,
    check_computed,
    check_main_params,
    check_module,
    check_package,
    explain_other_modules,
)


class MultimodalStrategy(CheckpointStrategy):
    """Trains a LightningModule with a layout per modality. The trainer sets the arguments that are not listed.

    Args:
        modalities: layout of each by name: a `Modality`, a mapping of its fields or its number of stages; without
            any, all ranks are replicas of the whole model.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zero_bubble"``, ``"zbv"`` or ``"auto"``; the path of a
            table of actions (``.csv``); or a function that makes one of the graph of stages.
        batching: how batches become microbatches, and microbatches one loss. Groups may be mappings of their fields.
        placement: rank of each position of the layout, or names of axes, outermost first, as ``["dp", "pp", "tp"]``.
        checkpoint: what is saved: ``"full"``, one file as Lightning saves it; ``"sharded"``, a directory; or the group
            of all that concerns checkpoints.
        launch: how processes start and speak with each other.
        numerics: what precision parameters have beside the trainer's, and what numbers that are not finite do.
        timeline: file for the timeline of the last whole training step, measured beside simulated: a picture (``.png``,
            ``.svg``, ``.pdf``) or a Chrome trace (``.json``).
        ungrouped: fields of groups without their group, as before there were groups; for this release.

    Raises:
        ConfigError: a field cannot work, whatever the model and the number of ranks.
    """

    def __init__(
        self,
        modalities: dict[str, Modality | int | dict[str, Any]] | None = None,
        schedule: AnySchedule = "1f1b",
        batching: BatchingOptions | dict[str, Any] | None = None,
        placement: list[int] | list[str] | None = None,
        checkpoint: Literal["full", "sharded"] | CheckpointOptions | dict[str, Any] = "full",
        launch: LaunchOptions | dict[str, Any] | None = None,
        numerics: NumericsOptions | dict[str, Any] | None = None,
        timeline: str | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **ungrouped: Any,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name in FIELDS}
        refused: ConfigError | None = None
        try:
            fields = option_values(arguments | fields_of_strategy(**ungrouped))
        except ConfigError as error:
            fields, refused = option_values(dict.fromkeys(FIELDS)), error
        explain_other_modules()
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            start_method=fields["start_method"],
            backend=fields["process_group_backend"],
            timeout=fields["timeout"],
            watchdog=fields["watchdog"],
            fields=fields,
        )
        self.schedule = schedule
        self.microbatch_size = fields["microbatch_size"]
        self.num_microbatches = fields["num_microbatches"] or (1 if self.microbatch_size is None else None)
        self._usual_count: int | None = None
        self._dataloader_hooks: DataloaderHooks | None = None
        self._random_state: Tensor | None = None  # of the process that calls the trainer
        self.microbatching, self.loss_weight = fields["microbatching"], fields["loss_weight"]
        self.bucket_bytes, self.main_params = fields["bucket_bytes"], fields["main_params"]
        self._placement, self.timeline = placement, timeline
        self.modalities: dict[str, Modality] = {}
        try:
            if refused is not None:
                raise refused
            parsed = as_modalities({"model": Modality()} if modalities is None else modalities)
            check_fields(fields | {"modalities": parsed}, {*BACKENDS, *dist.Backend.backend_list})
            self._features = made_features(fields)
            self.modalities = for_schedule(parsed, schedule, loss_modality_of(parsed))
        except ConfigError as error:
            self.refuse(error)

    # --- configuration ---

    def usual_microbatches(self) -> int:
        """Return M; with `microbatch_size` that of the usual batch.

        Raises:
            ConfigError: with `microbatch_size`, before anything tells how many samples a batch has.
        """
        if self.num_microbatches is None and self._usual_count is None:
            rule = "The number of microbatches follows from the batches, and their size is not known here"
            fix = "Set num_microbatches=8, for instance, and microbatch_size to null"
            raise ConfigError("batching.microbatch_size", self.microbatch_size, rule, fix)
        return self.num_microbatches or self._usual_count or 1

    def expect_batch(self, samples: int) -> None:
        """Take note of the samples in a usual batch, from which `microbatch_size` makes the number of microbatches."""
        self._usual_count = None if self.microbatch_size is None else -(-samples // self.microbatch_size)

    @cached_property
    def layout(self) -> Layout:
        """Which rank is where; raises ConfigError where the sizes do not fill the world."""
        self.raise_refused()
        return Layout.build(
            self.modalities,
            world_size=self.own_world_size,
            loss_modality=loss_modality_of(self.modalities),
            ranks_per_node=self.num_processes,
            placement=self._placement,
        )

    @override
    def validate_before_launch(
        self, module: pl.LightningModule, *data: Any, callbacks: Sequence[pl.Callback] = ()
    ) -> None:
        """Refuse what `validate` refuses, and what can be laid out but not computed. The launchers call it.

        A `configure_model` runs on a copy without memory in the process that starts the others. Where it fails there,
        before `prepare_data` and `setup`, its module is checked in `setup` alone. So is one with a `setup` of its own
        that does not fit before.
        """
        self._random_state = packed_state()
        check_backend(self._process_group_backend, self.root_device)
        check_computed(self.modalities)
        refuse_other_processes(module, starts_processes=isinstance(self._launcher, ProcessLauncher))
        assert self.layout.size  # raises where the sizes do not fill the world
        self._check_data(module, data)
        if not is_configured(module):
            environment = self.cluster_environment
            starts = environment is not None and not environment.creates_processes_externally
            built = try_configured(module, self.precision_plugin) if starts and self.world_size > 1 else None
            if built is None:
                return
            module = built
        try:
            plan = self._checked(module)
        except ConfigError:
            if not is_overridden("setup", module):
                raise
        else:
            self._check_callbacks(callbacks, plan)

    def validate(self, module: pl.LightningModule, *data: Any) -> Plan:
        """Check everything that needs no processes; return the plan.

        Args:
            module: the module to run; a `configure_model` runs on a copy without memory.
            data: what was passed to the trainer beside it.

        Raises:
            ConfigError: the layout does not fill the world or does not fit the module or the data.
        """
        assert self.layout.size  # raises where the sizes do not fill the world
        self._check_data(module, data)
        return self._checked(configured(module, self.precision_plugin))

    def _check_data(self, module: pl.LightningModule, data: Sequence[Any]) -> None:
        check_package("data", data)
        if self.microbatching == "split" and not callable(getattr(module, "split_batch", None)):
            if self.num_microbatches is not None:
                check_batches(data, self.num_microbatches)
            elif sizes := batch_sizes(data):
                self.expect_batch(sizes[0])

    def _checked(self, module: pl.LightningModule) -> Plan:
        """Return the plan of a module whose `configure_model` has run; raise ConfigError where it cannot run."""
        plan = self._plan(module)
        check_main_params(self.main_params, module, self.precision_plugin)
        check_module(module, plan, self.num_microbatches, self.schedule)
        for feature in self._features:
            feature.check(module, plan, self.root_device)
        return plan

    def _check_callbacks(self, callbacks: Sequence[pl.Callback], plan: Plan) -> None:
        for feature in self._features:
            feature.check_callbacks(callbacks, plan)

    def plan(self, module: pl.LightningModule) -> Plan:
        """Return which rank runs which stage of `module`; a `configure_model` runs on a copy without memory.

        Raises:
            ConfigError: the configuration does not fit the module.
        """
        return self._plan(configured(module, self.precision_plugin))

    def _plan(self, module: pl.LightningModule) -> Plan:
        options: Any = {"v_shaped": self.schedule == "zbv", "main_params": self.main_params}
        modalities = self.modalities
        with ExitStack() as errors:
            for replicas in parts("pipelines"):
                errors.enter_context(replicas.as_said(modalities))
                modalities = replicas.completed(modalities, self.own_world_size)
            earlier_plan = kept_plan(module, self.layout, modalities, **options)
            return earlier_plan or Plan.of(module, self.layout, modalities, **options)

    def simulate(self, module: pl.LightningModule | None = None) -> Simulation:
        """Return the ideal timeline of one training step of all replicas.

        Args:
            module: what to train; the trainer's where unset. The unit of time is that of `Modality.cost`, or a
                multiply-add per token.
        """
        module = configured(module or self._module("simulate"), self.precision_plugin)
        return self._plan(module).graphs.simulate(self.schedule, self.usual_microbatches(), module)

    # --- the life of a run ---

    @override
    def setup_environment(self) -> None:
        called_with = packed_state() if self._random_state is None else self._random_state
        self._random_state = None
        super().setup_environment()
        if self.num_replicas == 1:  # what is drawn from now on is drawn on all ranks as by one process
            self.take_random_state(called_with)
        self._dataloader_hooks = DataloaderHooks(
            self._module("setup_environment").trainer, lambda: as_replica(self.replica_rank, self.num_replicas)
        )
        if self.num_replicas == 1:
            put_in_no_sampler(self._module("setup_environment").trainer)

    @property
    def num_replicas(self) -> int:
        """Replicas that share the data: those of the loss modality."""
        return self.layout.num_replicas

    @property
    def replica_rank(self) -> int:
        """The replica that this rank works for, of `num_replicas`: all ranks with the same one read the same samples.

        A rank that works for several reads for each; outside of dataloaders this is the first of them.
        """
        seen = seen_replica()
        return self.layout.replicas_of_rank(self.own_rank)[0] if seen is None else seen[0]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_replicas, "rank": self.replica_rank}

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._end_construction()
        module = self._converted(self.lightning_module)
        self.model = module
        plan = self._checked(module)  # `setup` and `configure_model` may have changed it
        self._check_callbacks(vars(trainer)["callbacks"], plan)
        self._last_plan = plan
        self._stages = plan.topology.stages_of(self.global_rank)
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self._fit_plan = plan
        assert self._agreement is not None
        self._agreement.check("model", structure(module, plan))
        self._take_weights(module, plan)
        self._failed = False
        options = self.run_options(plan)
        self._session = Session(module, plan, options)
        self.model_to_device()
        self._load_waiting()
        if fits:
            self.setup_optimizers(trainer)
            self._agreement.check("optimizers", optimizers(self.optimizers))
        self._session.share(self.optimizers if fits else ())
        self.setup_precision_plugin()
        self._session.attach(trainer)

    def run_options(self, plan: Plan) -> RunOptions:
        """Return how this rank runs `plan`."""
        return RunOptions(
            schedule=loaded(self.schedule),
            num_microbatches=self.num_microbatches,
            microbatch_size=self.microbatch_size,
            microbatching=self.microbatching,
            loss_weight=self.loss_weight,
            rank=self.global_rank,
            device=self.root_device,
            timeout=self._timeout,
            seed=self._seed,
            features=self._features,
            checkpoints=self._checkpoints,
            bucket_bytes=self.bucket_bytes,
        )

    @override
    def model_to_device(self) -> None:
        self._module("model_to_device").to(self.root_device)

    @override
    def teardown(self) -> None:
        if self._session is not None:
            is_full = self._checkpoints.in_shards is None
            targets = range(0, self.layout.size, self.num_processes) if is_full else ()
            self._session.close(targets, failed=self._failed)
            self._session = None
        if self._dataloader_hooks is not None:
            self._dataloader_hooks.remove()
            self._dataloader_hooks = None
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self._session is not None:
            self._session.abort()
        super().on_exception(exception)

    @override
    def _layout_fields(self) -> dict[str, Any]:
        return layout_fields(self.layout, self.modalities, self.schedule, self.num_microbatches, self.microbatch_size)

    # --- data ---

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # also before `setup`: a module may ask in its own hook how many steps there will be
        if self._agreement is not None:
            self._agreement.check("dataloader", loader(dataloader))
        layout, module = self.layout, self._module("process_dataloader")
        trainer = module.trainer
        served = layout.replicas_of_rank(self.own_rank)
        dataloader = shard_loader(
            dataloader,
            shards=served,
            num_shards=layout.num_replicas,
            seed=self._seed,
            unshared=all(len(layout.replica_ranks(number)) == 1 for number in served),
            trainer=self._resume.watch(trainer) if trainer.training else None,
            shares=layout.microbatches(self.num_microbatches or 1) if trainer.training and layout.deals else None,
            shared_objects=[trainer, *module.modules()],
        )
        for feature in self._features:
            feature.loading(dataloader, trainer, self._agreement)
        if self.microbatching == "loader" and self.num_microbatches is not None and self.num_microbatches > 1:
            return group_batches(dataloader, self.num_microbatches)
        return dataloader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        move = partial(super().batch_to_device, device=device, dataloader_idx=dataloader_idx)
        if self._session is None:
            return per_replica(move)(batch)
        with self._session.moving():
            return self._session.shown.show(per_replica(move)(batch))

    # --- steps ---

    def device_mesh(self, modality: str) -> DeviceMesh | None:
        """Return torch's mesh of a modality's ranks while a run lasts; None on ranks of others.

        Its dims are those of ``pp``, ``dp``, ``cp`` and ``tp`` that have two ranks or more, with process groups of
        their own, so that all ranks call it together, for the first time, in a hook such as ``on_fit_start``.

        Args:
            modality: its name.

        Raises:
            ConfigError: there is no such modality, it is on one rank, or its ranks are no mesh.
        """
        return self._run("device_mesh").device_mesh(modality)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        run, is_automatic = self._run("training_step"), self._module("training_step").automatic_optimization
        if run.is_plain:
            with nullcontext() if is_automatic else run.optimization.sums_own_backwards():
                output = super().training_step(*args, **kwargs)
            skips = output is None and self.world_size > 1 and is_automatic
            return skipped(self.root_device) if skips else output
        if not is_automatic:
            with run.optimization.sums_own_backwards():
                return run.optimize((*args, *kwargs.values()), self.precision_plugin.train_step_context)
        return run.train(self.optimizers, self.precision_plugin, (*args, *kwargs.values()))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, super().validation_step, args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, super().test_step, args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, super().predict_step, args)

    def _evaluate(self, name: str, context: Any, plain: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        run = self._run(name)
        return plain(*args) if run.is_plain else run.evaluate(name, args, context)

    # --- gradients ---

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """As Lightning's own, but with gradients summed over ranks before `on_after_backward` shows them to users."""
        self.pre_backward(closure_loss)
        optimization = self._run("backward").optimization
        closure_loss = optimization.backward(closure_loss, self.precision_plugin, optimizer, *args, **kwargs)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        run = self._run("block_backward_sync")
        run.optimization.syncs = False
        try:
            yield
            run.optimization.show_shares(shown=False)
        finally:
            run.optimization.syncs = True
            run.shared.rest()
            run.optimization.hidden.show()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result, run = None, self._run("optimizer_step")
        with (
            run.guard.suspended("the step of an optimizer"),
            run.optimization.stepping(optimizer, closure, self.precision_plugin) as agreed,
        ):
            result = super().optimizer_step(optimizer, agreed, model, **kwargs)
        run.stepped()
        return result

    def grad_norm(self, norm_type: float = 2.0, names: Collection[str] | None = None) -> Tensor:
        """Return the norm of all gradients of the module, each element counted once, on every rank; collective.

        Args:
            norm_type: the p of the p-norm; ``inf`` for the largest.
            names: of the parameters whose gradients are counted; None for all.

        Returns:
            A tensor of one element, equal on all ranks; 0 where there are no gradients.

        Raises:
            ConfigError: a name is not in the module; nothing runs.
        """
        return self._run("grad_norm").optimization.norm(norm_type, names)

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return `grad_norm` of all gradients: its older name."""
        return self.grad_norm(norm_type)

    def full_parameters(self) -> AbstractContextManager[None]:
        """Return what is entered to see full parameters on every rank, outside of steps; collective.

        What is written to them is taken over by the ranks that hold them. All ranks must write the same. Hooks of
        modules and callbacks need no such context: the first use of a parameter gathers all of them.

        Raises:
            ConfigError: nothing runs.
        """
        return self._full_view("full_parameters", "values")

    def full_gradients(self) -> AbstractContextManager[None]:
        """Return what is entered to see full gradients on every rank, outside of steps; collective.

        Within it ``parameter.grad`` is the full gradient, or None where no rank has one. What is written or assigned is
        taken over by the ranks that hold the parameter. All ranks must write the same.

        Raises:
            ConfigError: nothing runs.
        """
        return self._full_view("full_gradients", "gradients")

    def _full_view(self, method: str, kind: str) -> AbstractContextManager[None]:
        rule = "Full tensors are shown from the end of setup on, by the feature 'full_views'"
        fix = "Call it in a hook after configure_optimizers; where the feature is missing, install the whole package"
        return required(self._run(method).guard.entered, method, rule, fix)(f"the end of {method}()", kind)

    # --- communication of Lightning's own ---

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas of the loss modality, each counted once; the same result on all ranks."""
        collectives = self._collectives
        return collectives.reduce(tensor, reduce_op) if isinstance(tensor, Tensor) and collectives else tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather ``[D, ...]`` from the D replicas of the loss modality; inside a step, from within it."""
        # a LightningModule passes the world where its user passed nothing
        collectives = self._collectives
        if collectives is None or collectives.is_plain or group not in (None, dist.group.WORLD):
            return super().all_gather(tensor, group, sync_grads)
        return collectives.all_gather(tensor, sync_grads)

    @property
    def _collectives(self) -> ReplicaCollectives | None:
        """Those of the run, or after it those of its layout; None before the first run."""
        if self._session is not None:
            return self._session.collectives
        if self._last_plan is None or not dist.is_initialized():
            return None
        return ReplicaCollectives(self._last_plan, self.global_rank)


# a parser hands any value on, and the constructor refuses a wrong one in its own words
for _function in (MultimodalStrategy.__init__, fields_of_strategy):
    _hints = _function.__annotations__
    _hints |= {name: f"{hint} | Any" for name, hint in _hints.items() if name not in (*OBJECTS, "return")}
