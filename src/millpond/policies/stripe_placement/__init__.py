"""Which nodes hold the shards of a stripe (kvstore 2.6)."""

from millpond.policies.stripe_placement.epochs import add_epoch as add_epoch
from millpond.policies.stripe_placement.epochs import make_epoch as make_epoch
from millpond.policies.stripe_placement.epochs import retire_epochs as retire_epochs
from millpond.policies.stripe_placement.rebuild_reads import plan_rebuild_reads as plan_rebuild_reads
from millpond.policies.stripe_placement.report import report_placement as report_placement
