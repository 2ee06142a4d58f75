"""`hotspan serve MODEL`: hotspan's options, and after them whatever vLLM takes."""

from pathlib import Path
from typing import Annotated

import typer

from hotspan.cli.errors import explained

OWN_OPTIONS = (
    "--ram-gib",
    "--disk",
    "--disk-gib",
    "--l2",
    "--l2-option",
    "--l2-log",
    "--chunk-tokens",
    "--no-cache",
    "--model-digest",
    "--persistence",
    "--kek",
    "--key-store",
    "--tenants",
    "--share-across-tenants",
    "--admin-token-file",
    "--insecure",
    "--host",
    "--port",
)


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model's directory, or its hub id.")],
    ram_gib: Annotated[float, typer.Option(help="RAM tier, in GiB of /dev/shm.")] = 4.0,
    disk: Annotated[Path | None, typer.Option(help="Disk tier: a directory of its own, best on NVMe.")] = None,
    disk_gib: Annotated[float | None, typer.Option(help="Disk tier, in GiB; allocated at the start.")] = None,
    l2: Annotated[
        str | None,
        typer.Option(
            help="A cache that replicas share: sagemaker-hyperpod://HOST:9200 (`hotspan daemon`, or SageMaker "
            "HyperPod's), redis:// or rediss://HOST:PORT, file:///SHARED/DIRECTORY or s3://BUCKET/PREFIX."
        ),
    ] = None,
    l2_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the L2's client, such as timeout_ms=1000. May be repeated.")
    ] = None,
    l2_log: Annotated[
        str | None,
        typer.Option(
            help="Where invalidations are shared if the L2 can't do that (SageMaker's own): redis:// or file:///."
        ),
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens kept and found as one.")] = 256,
    model_digest: Annotated[
        str, typer.Option(help="How weights are told apart: sampled (fast) or full (reads all of them).")
    ] = "sampled",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Serve without hotspan's tiers.")] = False,
    persistence: Annotated[
        str, typer.Option(help="tiers, or none: nothing leaves memory, and a disk tier is refused.")
    ] = "tiers",
    kek: Annotated[
        str | None,
        typer.Option(help="Encrypt what leaves RAM under this key: file:PATH, env:NAME or aws-kms:KEY."),
    ] = None,
    key_store: Annotated[
        Path | None, typer.Option(help="The tenants' wrapped keys: a directory that `hotspan keys init` made.")
    ] = None,
    tenants: Annotated[
        Path | None,
        typer.Option(help="YAML with API keys, shares and times to live by tenant; then every client needs a key."),
    ] = None,
    share_across_tenants: Annotated[
        bool, typer.Option("--share-across-tenants", help="Let tenants hit each other's texts: they can tell.")
    ] = False,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(help="File (0600) with the admin token; else HOTSPAN_ADMIN_TOKEN, else one is made for this run."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines in without keys (a --host beyond 127.0.0.1).")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
) -> None:
    """Serve MODEL with an OpenAI API; long texts are computed once.

    Every option of `vllm serve` may follow, such as --dtype, --max-model-len or --tensor-parallel-size.
    """
    with explained():
        from hotspan.config.settings import cache_settings, named_values
        from hotspan.config.tenants import Tenants, load_tenants
        from hotspan.server.options import ServeOptions
        from hotspan.server.run import run_server
        from hotspan.tiers.stores.open import parse_store_url

        for option, url in (("--l2", l2), ("--l2-log", l2_log)):
            if url is not None:
                parse_store_url(option, url)
        known = Tenants() if tenants is None else load_tenants(tenants)
        settings = None
        if not no_cache:
            settings = cache_settings(
                ram_gib=ram_gib,
                disk=disk,
                disk_gib=disk_gib,
                l2=l2,
                l2_options=named_values("--l2-option", l2_option or []),
                l2_log=l2_log,
                chunk_tokens=chunk_tokens,
                model_digest=model_digest,
                persistence=persistence,
                kek=kek,
                key_store=key_store,
                is_isolated=not share_across_tenants,
                is_strict=known.has_keys,
                tenants=known.shares,
                retention=known.retention,
            )
        options = ServeOptions(
            model,
            host,
            port,
            settings,
            tuple(context.args),
            tenants=known,
            is_isolated=not share_across_tenants,
            admin_token_file=admin_token_file,
            is_insecure=insecure,
        )
        run_server(options, OWN_OPTIONS)
