# Finds the CUDA compiler, enables the language and turns rows of csrc/programs.def into sources of the core.

include("${CMAKE_CURRENT_LIST_DIR}/CakeGdnArchs.cmake")

# Chooses the compiler before CMake's own search, which would take any nvcc on PATH: an old one gives a wheel that lacks
# architectures, and nobody asked for it. CMAKE_CUDA_COMPILER or CUDACXX win; else nvcc of the PyPI packages.
macro(cake_gdn_enable_cuda)
    if(NOT CMAKE_CUDA_COMPILER AND "$ENV{CUDACXX}" STREQUAL "")
        # Python knows its whole path, which in an isolated build has several folders of packages.
        find_package(Python COMPONENTS Interpreter QUIET)
        set(_cake_roots "")
        if(Python_Interpreter_FOUND)
            execute_process(
                COMMAND ${Python_EXECUTABLE} -c "import nvidia.cu13 as p; print(*p.__path__, sep=';', end='')"
                OUTPUT_VARIABLE _cake_roots
                ERROR_QUIET
            )
        endif()
        list(TRANSFORM _cake_roots APPEND "/bin")
        find_program(CAKE_GDN_NVCC nvcc PATHS ${_cake_roots} NO_DEFAULT_PATH NO_CACHE)
        if(NOT CAKE_GDN_NVCC)
            message(
                FATAL_ERROR
                "cake_gdn_det: no CUDA compiler. Do one of:\n"
                "  - build a CPU-only package: set CAKE_GDN_CUDA=OFF;\n"
                "  - name a toolkit's compiler: set CUDACXX=/path/to/nvcc (an nvcc that is only on PATH is not taken);\n"
                "  - install the compiler where this build runs: pip install 'nvidia-cuda-nvcc==13.5.*' "
                "'nvidia-nvvm==13.5.*' 'nvidia-cuda-crt==13.5.*' 'nvidia-cuda-runtime==13.5.*' nvidia-cuda-cccl\n"
                "    (`pip install .` and `pip wheel .` do this themselves unless build isolation is off)."
            )
        endif()
        set(CMAKE_CUDA_COMPILER "${CAKE_GDN_NVCC}")
    endif()
    # The PyPI packages before 13.1 keep the runtime in lib, where their own nvcc does not look.
    set(_cake_nvcc "${CMAKE_CUDA_COMPILER}")
    if(NOT _cake_nvcc)
        set(_cake_nvcc "$ENV{CUDACXX}")
    endif()
    cmake_path(GET _cake_nvcc PARENT_PATH _cake_bin)
    cmake_path(GET _cake_bin PARENT_PATH _cake_root)
    if(EXISTS "${_cake_root}/lib/libcudart_static.a" AND NOT EXISTS "${_cake_root}/lib64")
        string(APPEND CMAKE_CUDA_FLAGS " -L${_cake_root}/lib")
    endif()
    # Each program names its own architectures.
    set(CMAKE_CUDA_ARCHITECTURES OFF)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    enable_language(CUDA)
    message(STATUS "cake_gdn_det: CUDA ${CMAKE_CUDA_COMPILER_VERSION}, ${CMAKE_CUDA_COMPILER}")
    cake_gdn_read_programs("${PROJECT_SOURCE_DIR}/csrc/programs.def")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/programs.def")
    cake_gdn_select_archs("${CMAKE_CUDA_COMPILER_VERSION}" "${CAKE_GDN_ARCHS}")
endmacro()

# Adds the GPU backend and every program to `target`: code for exactly the architectures that a program claims and the
# build has, no PTX (code for another architecture must not appear by just-in-time compilation).
function(cake_gdn_add_programs target)
    target_compile_definitions(${target} PRIVATE CAKE_GDN_WITH_CUDA)
    target_sources(${target} PRIVATE csrc/api/stages.cpp csrc/cuda/backend.cpp csrc/cuda/chain.cpp csrc/cuda/device.cpp)
    target_include_directories(${target} PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    foreach(program IN LISTS CAKE_GDN_PROGRAMS)
        file(GLOB source csrc/cuda/fwd/${program}.cu csrc/cuda/bwd/${program}.cu)
        list(LENGTH source count)
        if(NOT count EQUAL 1)
            message(FATAL_ERROR "programs.def: ${program} needs one source, fwd/${program}.cu or bwd/${program}.cu")
        endif()
        set(code "")
        foreach(arch IN LISTS CAKE_GDN_PROGRAM_ARCHS_${program})
            if(arch IN_LIST CAKE_GDN_BUILT_ARCHS)
                list(APPEND code "--generate-code=arch=compute_${arch},code=[sm_${arch}]")
            endif()
        endforeach()
        if(NOT code)
            message(FATAL_ERROR "cake_gdn_det: no architecture of program ${program} is in this build")
        endif()
        target_sources(${target} PRIVATE ${source})
        set_property(SOURCE ${source} PROPERTY COMPILE_OPTIONS ${code})
    endforeach()
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
        set(compress "--compress-mode=size;")
    endif()
    target_compile_options(
        ${target}
        PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xfatbin=-compress-all;${compress}--Werror=all-warnings;-Xcompiler=-Wall>"
    )
endfunction()

# ccache where there is one, and the time of every CUDA compilation in the build log. ccache keys CUDA by the included
# files themselves (depend mode): preprocessed text does not tell apart what only one __CUDA_ARCH__ sees.
find_program(CAKE_GDN_CCACHE ccache)
if(CAKE_GDN_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${CAKE_GDN_CCACHE})
endif()
if(NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E time)
    if(CAKE_GDN_CCACHE)
        list(
            APPEND CMAKE_CUDA_COMPILER_LAUNCHER
            ${CMAKE_COMMAND}
            -E
            env
            CCACHE_DEPEND=1
            ${CAKE_GDN_CCACHE}
        )
    endif()
endif()
