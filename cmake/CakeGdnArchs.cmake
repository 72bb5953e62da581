# The architecture gate: which architectures and programs of csrc/programs.def a toolkit builds. Plain script code with
# no project state, so that the tests run it alone:
#
#     cmake -D CUDA_VERSION=13.0 -D ARCHS="90a 107a" -P cmake/CakeGdnArchs.cmake

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
    cmake_minimum_required(VERSION 3.24...4.1)
endif()

# cake_gdn_read_programs(<file>) sets in the caller:
#   CAKE_GDN_KNOWN_ARCHS            list of names, in table order
#   CAKE_GDN_ARCH_CUDA_<name>       minimum CUDA version
#   CAKE_GDN_PROGRAMS               list of names
#   CAKE_GDN_PROGRAM_ARCHS_<name>   list of architectures
macro(cake_gdn_read_programs file)
    set(CAKE_GDN_KNOWN_ARCHS "")
    set(CAKE_GDN_PROGRAMS "")
    file(STRINGS "${file}" _cake_rows REGEX "^(ARCH|PROGRAM)\\(")
    foreach(_cake_row IN LISTS _cake_rows)
        if(_cake_row MATCHES "^ARCH\\(([0-9]+[a-z]?), ([0-9]+), ([0-9]+\\.[0-9]+)\\)$")
            list(APPEND CAKE_GDN_KNOWN_ARCHS ${CMAKE_MATCH_1})
            set(CAKE_GDN_ARCH_CUDA_${CMAKE_MATCH_1} ${CMAKE_MATCH_3})
        elseif(_cake_row MATCHES "^PROGRAM\\(([a-z0-9_]+), \"([0-9a-z ]+)\"\\)$")
            list(APPEND CAKE_GDN_PROGRAMS ${CMAKE_MATCH_1})
            string(REPLACE " " ";" CAKE_GDN_PROGRAM_ARCHS_${CMAKE_MATCH_1} "${CMAKE_MATCH_2}")
        else()
            message(FATAL_ERROR "${file}: not a row: ${_cake_row}")
        endif()
    endforeach()
endmacro()

# cake_gdn_select_archs(<toolkit's CUDA version> <wanted names, or empty: all>) sets in the caller CAKE_GDN_BUILT_ARCHS and
# CAKE_GDN_DROPPED_ARCHS. An architecture that the user named is built or is an error; one of the default list that
# the toolkit cannot build is dropped with a notice.
function(cake_gdn_select_archs version wanted)
    string(REGEX MATCHALL "[^ ,;]+" names "${wanted}")
    set(built "")
    set(dropped "")
    foreach(name IN LISTS names)
        if(NOT name IN_LIST CAKE_GDN_KNOWN_ARCHS)
            list(JOIN CAKE_GDN_KNOWN_ARCHS " " known)
            message(FATAL_ERROR "CAKE_GDN_ARCHS: unknown architecture '${name}'; allowed: ${known}")
        endif()
    endforeach()
    foreach(name IN LISTS CAKE_GDN_KNOWN_ARCHS)
        set(minimum ${CAKE_GDN_ARCH_CUDA_${name}})
        if(names AND NOT name IN_LIST names)
            continue()
        elseif(version VERSION_GREATER_EQUAL minimum)
            list(APPEND built ${name})
        elseif(names)
            message(
                FATAL_ERROR
                "CAKE_GDN_ARCHS: sm_${name} needs CUDA ${minimum} or newer, and this toolkit is CUDA ${version}"
            )
        else()
            list(APPEND dropped ${name})
            message(STATUS "cake_gdn_det: sm_${name} is dropped: it needs CUDA ${minimum} or newer, this is ${version}")
        endif()
    endforeach()
    if(NOT built)
        message(
            FATAL_ERROR
            "cake_gdn_det: CUDA ${version} builds none of the architectures; name a newer toolkit with CUDACXX"
        )
    endif()
    set(CAKE_GDN_BUILT_ARCHS "${built}" PARENT_SCOPE)
    set(CAKE_GDN_DROPPED_ARCHS "${dropped}" PARENT_SCOPE)
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
    cake_gdn_read_programs("${CMAKE_CURRENT_LIST_DIR}/../csrc/programs.def")
    cake_gdn_select_archs("${CUDA_VERSION}" "${ARCHS}")
    list(JOIN CAKE_GDN_BUILT_ARCHS " " _built)
    list(JOIN CAKE_GDN_DROPPED_ARCHS " " _dropped)
    message(STATUS "built: ${_built}")
    message(STATUS "dropped: ${_dropped}")
endif()
