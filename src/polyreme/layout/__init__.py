"""Where numbers lie: in a bucket, in a rank's local tensor, and which ranks form which axis."""
