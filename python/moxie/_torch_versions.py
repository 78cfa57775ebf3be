"""The versions of torch that moxie supports. cmake/find_torch.cmake, tools/setup.sh and the Makefile read these lines."""

OLDEST = "2.11"  # an older one is refused
NEWEST = "2.15"  # with a newer one nobody has run the tests: it is used, with a warning
