"""`meshwright doctor`: what works on this machine, and what would be faster."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from meshwright.base.errors import DONE, UNAVAILABLE
from meshwright.config import flags
from meshwright.config.fields import flag
from meshwright.runtime.ranks.world import find_world

ABOUT = (
    "Check this machine in a few seconds; under `meshwright launch` also the links between ranks. Status 0 means that "
    "training can start here, 69 that it cannot."
)


@dataclass(frozen=True)
class DoctorConfig:
    """Settings of `meshwright doctor`."""

    json: bool = flag(False, "print one line of JSON instead of a table", docs="data")


def main(argv: list[str]) -> int:
    c = flags.parse_settings(DoctorConfig, argv, "meshwright doctor", about=ABOUT).config
    from meshwright.apps.doctor import facts as doctor

    world = find_world(os.environ)
    links = doctor.examine_links(world)  # on all ranks, before one of them makes the machine busy
    if world.rank:
        return DONE
    facts = [*doctor.examine(), *links]
    verdict = doctor.conclude(facts)
    if c.json:
        print(json.dumps(doctor.as_dict(facts, verdict)))
    else:
        print("\n".join(doctor.fact_table(facts, verdict)))
    return UNAVAILABLE if doctor.is_fatal(facts) else DONE
