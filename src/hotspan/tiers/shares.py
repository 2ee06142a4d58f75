"""What each tenant is sure of in a tier, and may at most hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's part of one tier, in fractions of its capacity.

    floor: others can't push the tenant below it; None: the default floor (`Shares`).
    quota: it never holds more.

    Raises: ValueError for what is no fraction, or a floor above the quota.
    """

    floor: float | None = None
    quota: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.quota <= 1:
            raise ValueError(f"a quota is a fraction of the tier, from 0 to 1, not {self.quota}")
        if self.floor is not None and not 0 <= self.floor <= self.quota:
            raise ValueError(f"a floor lies between 0 and the quota, which is {self.quota}, not at {self.floor}")


@dataclass(frozen=True, slots=True)
class Shares:
    """Which part of a tier each tenant is sure of, and may at most hold.

    default_floor: for each tenant that holds chunks and has no floor of its own: this much of an equal share of what
                   the others' floors leave. Half by default: one half is sure, the other goes to whoever uses it best.
    by_tenant:     the shares that were given; any other tenant has the default floor and no quota.

    Raises: ValueError if the floors exceed the tier.
    """

    default_floor: float = 0.5
    by_tenant: Mapping[int, Share] = field(default_factory=dict)
    _given: float = field(init=False, repr=False, compare=False, default=0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.default_floor <= 1:
            raise ValueError(
                f"the default floor is a fraction of an equal share, from 0 to 1, not {self.default_floor}"
            )
        given = sum(share.floor or 0.0 for share in self.by_tenant.values())
        if given > 1 + 1e-9:
            raise ValueError(f"the tenants' floors add up to {given:g} of the tier: lower some")
        object.__setattr__(self, "_given", min(1.0, given))

    def has_floor(self, tenant: int) -> bool:
        """Whether the tenant was given a floor of its own."""
        share = self.by_tenant.get(tenant)
        return share is not None and share.floor is not None

    def floor(self, tenant: int, sharing: int) -> float:
        """The fraction that others leave the tenant while `sharing` tenants here have the default floor."""
        share = self.by_tenant.get(tenant)
        if share is not None and share.floor is not None:
            return share.floor
        return self.default_floor * (1 - self._given) / max(1, sharing)

    def quota(self, tenant: int) -> float:
        """The fraction that the tenant may at most hold."""
        share = self.by_tenant.get(tenant)
        return 1.0 if share is None else share.quota
