/*
 * QEMU's TCG, up to version 11 at least, forgets its big lock in one place: when a nested guest writes CR8
 * while KVM waits for an interrupt window, the emulated processor raises the virtual interrupt at once, and
 * tcg_handle_interrupt() ends the whole emulator because the lock is not held. OVMF writes CR8 in each
 * exception frame and Windows at each change of IRQL, so on a busy machine the lab would die within seconds.
 *
 * This library stands before that one function (LD_PRELOAD) and takes the lock where it is missing. It works
 * with QEMU 7.2 of Debian 12, whose TCG is a module that calls the function by its name.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

bool qemu_mutex_iothread_locked(void);
void qemu_mutex_lock_iothread_impl(const char *file, int line);
void qemu_mutex_unlock_iothread(void);

typedef void handle_interrupt(void *cpu, int mask);

static int is_tcg(struct dl_phdr_info *object, size_t size, void *found)
{
    (void)size;
    if (!strstr(object->dlpi_name, "/accel-tcg-x86_64.so"))
        return 0;
    *(void **)found = dlopen(object->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    return 1;
}

static handle_interrupt *original(void)
{
    void *module = NULL, *function;

    if (!dl_iterate_phdr(is_tcg, &module) || !module)
        abort();
    function = dlsym(module, "tcg_handle_interrupt");
    if (!function)
        abort();
    return (handle_interrupt *)function;
}

void tcg_handle_interrupt(void *cpu, int mask)
{
    static handle_interrupt *next;
    bool locked = qemu_mutex_iothread_locked();

    if (!locked)
        qemu_mutex_lock_iothread_impl(__FILE__, __LINE__);
    if (!next)
        next = original();
    next(cpu, mask);
    if (!locked)
        qemu_mutex_unlock_iothread();
}
