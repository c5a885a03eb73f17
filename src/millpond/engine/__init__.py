"""Model runners. Carries out plans; decides nothing. Importing this package does not import torch."""
