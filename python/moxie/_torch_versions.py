"""The versions of torch that moxie supports. cmake/find_torch.cmake, tools/setup.sh and the Makefile read these lines."""

OLDEST = "2.11"  # an older one is refused
NEWEST = "2.15"  # not tested with newer ones: those are used, with a warning
