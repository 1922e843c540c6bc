"""A bucket, a Cloud Run and a gcloud of this machine, for the demo of a launch and the tests."""
