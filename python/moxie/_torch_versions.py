"""The versions of torch that moxie supports. cmake/find_torch.cmake, tools/setup.sh and the Makefile read these lines."""

OLDEST = "2.11"  # older versions are refused
NEWEST = "2.15"  # newer versions are untested, and give a warning
