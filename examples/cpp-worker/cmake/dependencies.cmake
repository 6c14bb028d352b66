# What the library is linked with, both where it is built and where it is used.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
find_dependency(PkgConfig)
pkg_check_modules(strata_worker_dependencies REQUIRED IMPORTED_TARGET grpc++ protobuf libcrypto)
