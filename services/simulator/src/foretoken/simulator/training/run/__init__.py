"""What a whole training run takes: failures, checkpoints, sites, money and a target date."""
