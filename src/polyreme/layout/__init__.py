"""Where numbers lie: in a bucket, in a rank's part of a tensor, and which ranks form which axis."""
