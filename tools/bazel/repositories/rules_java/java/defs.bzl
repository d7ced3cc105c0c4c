"""Stand-in for rules_java: the names that Bazel's own tools load, from the rules built into Bazel 4 to 6."""

java_library = native.java_library
java_binary = native.java_binary
java_test = native.java_test
java_import = native.java_import
java_lite_proto_library = native.java_lite_proto_library
java_proto_library = native.java_proto_library
java_package_configuration = native.java_package_configuration
java_plugin = native.java_plugin
java_runtime = native.java_runtime
java_toolchain = native.java_toolchain
