# The core library, its install rules and its package config.

add_library(
    cake_gdn_core
    OBJECT
    csrc/api/api.cpp
    csrc/api/build_info.cpp
    csrc/api/checks.cpp
    csrc/cpu/engine.cpp
    csrc/plan/gpu.cpp
    csrc/plan/pins.cpp
    csrc/plan/plan.cpp
    csrc/plan/segments.cpp
)
if(CAKE_GDN_WITH_CUDA)
    cake_gdn_add_programs(cake_gdn_core)
endif()

# The CPU engine's inner part, compiled once an instruction set and chosen at run time. A multiply and an add may be
# contracted (units differ in bits anyway); nothing else of fast-math, which would drop infinities and reorder sums.
set(CAKE_GDN_UNITS baseline)
set(CAKE_GDN_FLAGS_baseline "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    list(APPEND CAKE_GDN_UNITS avx2 avx512)
    set(CAKE_GDN_FLAGS_avx2 -mavx2 -mfma)
    set(CAKE_GDN_FLAGS_avx512
        -mavx512f
        -mavx512bw
        -mavx512dq
        -mavx512vl
        -mfma
        -mavx2
        -mprefer-vector-width=512
    )
endif()
set(CAKE_GDN_UNIT_OBJECTS "")
foreach(unit IN LISTS CAKE_GDN_UNITS)
    add_library(cake_gdn_unit_${unit} OBJECT csrc/cpu/unit.cpp)
    target_include_directories(cake_gdn_unit_${unit} PRIVATE csrc csrc/include)
    target_compile_definitions(cake_gdn_unit_${unit} PRIVATE CAKE_GDN_UNIT=${unit})
    target_compile_options(
        cake_gdn_unit_${unit}
        PRIVATE -ffp-contract=fast -fno-math-errno -Wall -Wextra ${CAKE_GDN_FLAGS_${unit}}
    )
    list(APPEND CAKE_GDN_UNIT_OBJECTS $<TARGET_OBJECTS:cake_gdn_unit_${unit}>)
endforeach()

# ---- what the build knows about itself ----

set(CAKE_GDN_GIT_COMMIT "")
find_package(Git QUIET)
if(GIT_FOUND AND EXISTS "${PROJECT_SOURCE_DIR}/.git")
    execute_process(
        COMMAND ${GIT_EXECUTABLE} describe --always --dirty --exclude=* --abbrev=40
        WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
        OUTPUT_VARIABLE CAKE_GDN_GIT_COMMIT
        OUTPUT_STRIP_TRAILING_WHITESPACE
        ERROR_QUIET
    )
endif()
set(CAKE_GDN_CUDA_VERSION "${CMAKE_CUDA_COMPILER_VERSION}")
list(JOIN CAKE_GDN_BUILT_ARCHS " " CAKE_GDN_ARCHS_TEXT)
list(JOIN CAKE_GDN_DROPPED_ARCHS " " CAKE_GDN_DROPPED_ARCHS_TEXT)
configure_file(cmake/cake_gdn_build_config.h.in generated/cake_gdn_build_config.h @ONLY)

list(JOIN CAKE_GDN_UNITS " " CAKE_GDN_UNITS_TEXT)
target_compile_definitions(cake_gdn_core PRIVATE "CAKE_GDN_UNITS=\"${CAKE_GDN_UNITS_TEXT}\"")
target_include_directories(cake_gdn_core PRIVATE csrc csrc/include "${PROJECT_BINARY_DIR}/generated")
target_compile_options(cake_gdn_core PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall> $<$<COMPILE_LANGUAGE:CXX>:-Wextra>)

# ---- the library ----

add_library(cake_gdn_det SHARED $<TARGET_OBJECTS:cake_gdn_core> ${CAKE_GDN_UNIT_OBJECTS})
add_library(cake_gdn_det::cake_gdn_det ALIAS cake_gdn_det)
target_include_directories(
    cake_gdn_det
    INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/csrc/include> $<INSTALL_INTERFACE:include>
)
target_link_libraries(cake_gdn_det PRIVATE Threads::Threads)
target_compile_features(cake_gdn_det INTERFACE c_std_99)
target_link_options(
    cake_gdn_det
    PRIVATE
        "LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/cake_gdn_det.map"
        "LINKER:--no-undefined,--exclude-libs,ALL,-z,now"
)
set_target_properties(
    cake_gdn_det
    PROPERTIES LINK_DEPENDS "${PROJECT_SOURCE_DIR}/cmake/cake_gdn_det.map" LINKER_LANGUAGE CXX
)

# ---- install ----

set(CAKE_GDN_CONFIG_DIR lib/cmake/cake_gdn_det)
install(TARGETS cake_gdn_det EXPORT cake_gdn_detTargets LIBRARY DESTINATION lib)
install(DIRECTORY csrc/include/cake_gdn_det DESTINATION include)
install(EXPORT cake_gdn_detTargets NAMESPACE cake_gdn_det:: DESTINATION ${CAKE_GDN_CONFIG_DIR})
configure_package_config_file(
    cmake/cake_gdn_detConfig.cmake.in
    generated/cake_gdn_detConfig.cmake
    INSTALL_DESTINATION ${CAKE_GDN_CONFIG_DIR}
)
write_basic_package_version_file(generated/cake_gdn_detConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
    FILES
        "${PROJECT_BINARY_DIR}/generated/cake_gdn_detConfig.cmake"
        "${PROJECT_BINARY_DIR}/generated/cake_gdn_detConfigVersion.cmake"
    DESTINATION ${CAKE_GDN_CONFIG_DIR}
)
