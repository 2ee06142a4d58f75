"""`hotspan plan MODEL`: which tiers this machine would get, and what they would do for a working set."""

import json
import urllib.error
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotspan.cli.options import runs
from hotspan.cli.plan_options import EngineOptions, PlanOptions, configuration_of, engine_options
from hotspan.config.admin_token import AdminToken
from hotspan.config.configuration import Configuration
from hotspan.config.environment import environment
from hotspan.config.planned import with_named
from hotspan.config.settings import CacheSettings
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB, Tier
from hotspan.http.local import open_url
from hotspan.plan.host import Host
from hotspan.plan.machines import GPU_MEMORY_UTILIZATION, Machine, Price, machine, price
from hotspan.plan.memory import copy_gb_s
from hotspan.plan.shape import ModelShape
from hotspan.plan.tiers import DiskChoice, Extent, Reason, TierPlan, choose_tiers
from hotspan.plan.weights import Weights, find_weights, model_directory

if TYPE_CHECKING:
    from hotspan.cli.plan_report import Report
    from hotspan.plan.advice import Advice
    from hotspan.plan.measured import Measured
    from hotspan.plan.rates import Rates
    from hotspan.plan.worth import Cost

_METRICS_TIMEOUT_S = 10.0


@runs(PlanOptions)
def plan(
    options: PlanOptions,
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Directory of a model, or hub ID of a downloaded model.")],
) -> None:
    """Show which tiers `hotspan serve` would choose, how much of a working set they hold, and whether they pay.

    Every option of `hotspan serve` may follow, such as --ram-gib or --tensor-parallel-size; serving.properties and
    environment variables are read as `hotspan serve` reads them.
    """
    from rich.console import Console

    from hotspan.cli.output import check_writable, print_json, print_written, stdout_console
    from hotspan.core.progress import waiting

    for path in (options.output, options.report):
        if path is not None:
            check_writable(path)
    configuration = configuration_of(model, options, context.args)
    directories = [] if not options.is_auto else None if options.disk is None else [options.disk]
    where = None if options.machine is None else machine(options.machine)
    with waiting(Console(stderr=True), f"looking at {'this machine and its disks' if where is None else model}"):
        found = Host.probe(environment(), directories, is_measured=options.measure) if where is None else where.host()
        report = _report(options, model, configuration, found, where)
    if options.json:
        print_json(report.to_json())
    else:
        report.print(stdout_console())
    if options.output is not None:
        options.output.write_text(json.dumps(report.to_json(), indent=2) + "\n")
        print_written(options.output, is_json=options.json)
    if options.report is not None:
        report.write_page(options.report)
        print_written(options.report, is_json=options.json)


def _report(
    options: PlanOptions, model: str, configuration: Configuration, host: Host, where: Machine | None
) -> "Report":
    from hotspan.cli.plan_report import Report, numbers_of_users
    from hotspan.engine.model_values import engine_values
    from hotspan.plan.advice import advise
    from hotspan.plan.asked import check_shape
    from hotspan.plan.measured import Measured
    from hotspan.plan.worth import judge

    directory, engine = model_directory(model), engine_options(options, configuration)
    shape = ModelShape.from_config(directory, kv_dtype=engine.kv_dtype, dtype=engine.dtype, tensor_parallel=engine.tp)
    counted = check_shape(directory, engine_values)
    if engine.max_model_len:
        shape = replace(shape, max_tokens=engine.max_model_len)
    told = Measured() if options.from_metrics is None else _measured(options.from_metrics, options.admin)
    case = _Case(options, engine, shape, find_weights(directory, engine.dtype), where, told)
    chosen, pool, l2 = case.sizes(host, configuration)
    rates = case.rates(host, chosen)

    def of(users: int, hits: Mapping[Tier, float] | None = None) -> "Advice":
        return advise(
            *(chosen, shape),
            users=users,
            tokens=options.tokens,
            gb_s=rates.gb_s,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            pool_bytes=pool,
            l2_bytes=l2,
            latency_s=rates.latency_s,
            hits=hits,
        )

    advice = of(options.users, told.hits if options.reuse is None else None)
    paid = price(options.machine, options.hourly_price, options.prices)
    return Report(
        model=model,
        where=case.where,
        plan=replace(
            chosen,
            reasons=(*chosen.reasons, counted, *case.reasons(pool), *case.missing(host, chosen), *rates.reasons()),
        ),
        rates=rates,
        engines=case.engines,
        advice=advice,
        by_users=tuple(of(number) for number in numbers_of_users(options.users)),
        verdict=judge(advice, case.reuse),
        price=paid,
        cost=case.cost(paid, advice),
        measured=dict(told.hits or {}),
    )


@dataclass(frozen=True, slots=True)
class _Case:
    """What is planned for: an engine, its model, and the machine; None is this host.

    told: what a running server measured.
    """

    options: PlanOptions
    engine: EngineOptions
    shape: ModelShape
    weights: Weights
    machine: Machine | None
    told: "Measured"

    @property
    def where(self) -> str:
        """What the tiers are on, in words."""
        if self.options.from_metrics is not None:
            return f"the server at {self.options.from_metrics}"
        return self.options.machine or "this machine"

    @property
    def reuse(self) -> float:
        """Measured hit rates are shares of all requests, and so are those of a working set unless --reuse is given."""
        return 1.0 if self.options.reuse is None else self.options.reuse

    @property
    def workers(self) -> int:
        """Engines of each model on the machine."""
        asked = self.options.workers or self.engine.data_parallel
        if asked or self.machine is None or self.options.cpu:
            return asked or 1
        return max(1, self.machine.gpus // (self.engine.tp * self.options.models))

    @property
    def engines(self) -> int:
        """All that share the machine. Raises: ConfigError if it has too few GPUs for them."""
        engines = self.workers * self.options.models
        if self.machine is not None and not self.options.cpu and engines * self.engine.tp > self.machine.gpus:
            raise ConfigError(
                f"{self.machine.name} has {self.machine.gpus} GPUs, and {engines} x {self.engine.tp} are needed: lower "
                "--tp, --workers or --models"
            )
        return engines

    def sizes(self, host: Host, configuration: Configuration) -> tuple[TierPlan, int, int]:
        """The tiers, the engine's pool (0 if unknown) and the part of the L2, in bytes."""
        options, engine = self.options, self.engine
        chosen = choose_tiers(
            host,
            self.shape,
            workers=self.workers,
            models=options.models,
            is_cpu_engine=options.cpu,
            weights_bytes=self.weights.bytes or 0,
            engine_pool_bytes=engine.pool_bytes,
            requests=engine.max_num_seqs,
            extent=Extent.ALL if options.is_auto or configuration.is_auto else Extent.MODEST,
        )
        if configuration.cache is not None:
            chosen = with_named(chosen, configuration.cache)
            chosen = replace(chosen, reasons=(*chosen.reasons, *_compression(configuration.cache)))
        pool = chosen.engine_pool_bytes or 0
        if not options.cpu:
            pool = (engine.pool_bytes or 0) * engine.tp  # vLLM's option is the size on each GPU
            if self.machine is not None and not pool:
                utilization = engine.utilization or GPU_MEMORY_UTILIZATION
                pool = self.machine.pool_bytes(self.weights.bytes or 0, engine.tp, utilization)
        return self._as_measured(chosen, pool, int(options.l2_size * GIB))

    def _as_measured(self, chosen: TierPlan, pool: int, l2: int) -> tuple[TierPlan, int, int]:
        """Tiers, pool and L2 of the sizes that the server has."""
        held = {tier: tokens * self._token_bytes(tier) for tier, tokens in self.told.capacity_tokens.items()}
        if not held:
            return chosen, pool, l2
        disk = held.get(Tier.DISK)
        directory = Path("disk") if chosen.disk is None else chosen.disk.directory
        names = ("KV", "weights") if Tier.GPU in held else ("KV", "weights", "engine's pool")
        kept = [each for each in chosen.reasons if each.what in names]
        measured = [
            Reason(tier.value if tier is Tier.DISK else tier.name, f"{size / GIB:.1f} GiB", "measured by the server")
            for tier, size in held.items()
            if tier is not Tier.GPU
        ]
        chosen = replace(
            chosen,
            ram_bytes=held.get(Tier.RAM, 0),
            disk=None if disk is None else DiskChoice(directory, disk),
            reasons=(*kept, *measured),
        )
        return chosen, held.get(Tier.GPU, pool), held.get(Tier.L2, l2)

    def rates(self, host: Host, chosen: TierPlan) -> "Rates":
        """What was given, else measured by a server, else estimated for a machine or, of the disk, measured here."""
        from hotspan.plan.rates import ASSUMED, Rates, estimated

        options, known = self.options, ASSUMED
        if self.machine is not None and not options.cpu:
            known = estimated(self.machine, self.weights.bytes or 0, self.engine.tp)
        for probe in host.disks:
            if chosen.disk is not None and probe.directory == chosen.disk.directory and probe.read_gb_s:
                known = known.updated(Rates(gb_s={Tier.DISK: probe.read_gb_s}), "measured")
        if options.cpu and options.measure and self.machine is None:
            known = known.updated(Rates(gb_s={Tier.RAM: copy_gb_s()}), "measured: copies in memory, by one thread")
        told = Rates(self.told.prefill_tokens_per_s, self.told.gb_s, self.told.latency_s)
        given = {Tier.RAM: options.ram_rate, Tier.DISK: options.disk_rate, Tier.L2: options.l2_rate}
        named = Rates(options.prefill_rate, {tier: rate for tier, rate in given.items() if rate})
        return known.updated(told, "measured by the server").updated(named, "as given")

    def reasons(self, pool: int) -> Iterator[Reason]:
        """The weights and the engine's pool, unless the tiers' own reasons have them."""
        if Tier.GPU in self.told.capacity_tokens:
            yield self._pool(pool, "measured by the server")
        elif self.options.cpu:
            return
        elif self.engine.pool_bytes:
            yield self._pool(pool, "as given")
        elif self.machine is not None:
            yield self._weights()
            machine = self.machine
            why = f"estimate for {self.engine.tp} of {machine.gpus} GPUs with {machine.gpu.memory_gib:g} GiB each"
            yield self._pool(pool, why if self.weights.bytes else f"{why}, too large by the weights")
        else:
            why = "name the machine with --machine, or give --from-metrics or --kv-cache-memory-bytes"
            yield Reason("engine's pool", "unknown", why)

    def missing(self, host: Host, chosen: TierPlan) -> Iterator[Reason]:
        """Given sizes for which the machine is too small if each engine has them."""
        if self.told.capacity_tokens:
            return
        disk = 0 if chosen.disk is None else chosen.disk.bytes
        memory = None if host.memory is None else host.memory.bytes
        drives = None if self.machine is None else int(self.machine.disk_gb * 1e9)
        for what, size, there in (("RAM", chosen.ram_bytes, memory), ("disk", disk, drives)):
            needed = size * self.engines
            if there is not None and needed > there:
                why = f"the machine has {there / GIB:,.1f} GiB: lower --{what.lower()}-gib or --workers"
                yield Reason(f"{what} of all engines", f"{needed / GIB:,.1f} GiB", why)

    def _token_bytes(self, tier: Tier) -> int:
        """What a token takes: in the pools of all ranks together, or in a tier, which has one copy for all ranks."""
        return self.shape.tier_bytes_per_token * (self.shape.copies if tier is Tier.GPU else 1)

    def _pool(self, pool: int, why: str) -> Reason:
        tokens = pool // (self._token_bytes(Tier.GPU) or 1)
        return Reason("engine's pool", f"{pool / GIB:,.1f} GiB, {tokens:,} tokens", why)

    def _weights(self) -> Reason:
        if self.weights.bytes:
            return Reason("weights", f"{self.weights.bytes / GIB:,.1f} GiB", self.weights.why)
        remedy = "add that index to the directory, or give --kv-cache-memory-bytes and --prefill-rate"
        return Reason("weights", "unknown", f"{self.weights.why}: {remedy}")

    def cost(self, paid: Price | None, advice: "Advice") -> "Cost | None":
        """Of prefill, at the price of the engine's share of the machine; None without a price."""
        from hotspan.plan.worth import cost

        if paid is None:
            return None
        return cost(
            *(advice, self.reuse, paid.usd_per_hour / self.engines),
            requests_per_hour=self.options.requests_per_hour,
            extra_usd=self.options.extra_price / self.engines,
        )


def _compression(settings: CacheSettings) -> Iterator[Reason]:
    """Tiers whose chunks are to be compressed, which the plan does not count."""
    for what, tier in (("disk", settings.disk), ("L2", settings.l2)):
        if tier is not None and tier.compress == "always":
            why = "this plan counts uncompressed chunks: the tier holds more, about 1.5 times as many in bfloat16"
            yield Reason(f"{what} compression", "not counted", why)


def _measured(url: str, token: AdminToken) -> "Measured":
    """What the server at `url` measured, with the admin token where it asks for one. Raises: ConfigError."""
    from hotspan.cli.admin_client import Admin
    from hotspan.plan.measured import measured

    server = url.rstrip("/").removesuffix("/metrics")
    address = f"{server}/metrics"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--from-metrics {url}: give an address such as http://localhost:8080")
    try:
        with open_url(address, _METRICS_TIMEOUT_S) as answer:
            page: str = answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403):
            raise ConfigError(f"{address} answers with status {error.code}: is it the address of a server?") from error
        admin = Admin(server=server, token=token.token, admin_token_file=token.admin_token_file)
        page = admin.text("/metrics", _METRICS_TIMEOUT_S)
    except OSError as error:
        raise ConfigError(f"{address} can't be read ({error}): is the server up, and its address right?") from error
    return measured(page)
