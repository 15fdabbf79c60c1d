/*
 * QEMU's TCG, up to version 11 at least, does not take its big lock around a processor's pending
 * interrupts in two places, both in its emulation of AMD-V. This library replaces
 * tcg_handle_interrupt() (LD_PRELOAD) and fixes both. It works with QEMU 7.2 of Debian 12, whose
 * TCG is a module that calls the function by its name.
 *
 * First: when a nested guest writes CR8 while KVM waits for an interrupt window, the emulated
 * processor raises the virtual interrupt at once, and tcg_handle_interrupt() ends the whole
 * emulator because the lock is not held. OVMF writes CR8 in each exception frame and Windows at
 * each change of IRQL. Therefore this library takes the lock.
 *
 * Second: helper_vmrun() and do_vmexit() set and clear the virtual interrupt in
 * interrupt_request without the lock and without an atomic operation. A bit that a timer of the
 * main loop sets in the same word at the same moment is lost, and with it the tick of the emulated
 * host: while its processor runs a busy guest, no other interrupt comes, and it hangs forever.
 * Therefore this library makes each processor poll its APIC, twenty times a second.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* CPU_INTERRUPT_POLL of target/i386/cpu.h: poll the APIC. */
#define POLL 0x10
#define PAUSE_US 50000
#define PROCESSORS 64

bool qemu_mutex_iothread_locked(void);
void qemu_mutex_lock_iothread_impl(const char *file, int line);
void qemu_mutex_unlock_iothread(void);

typedef void handle_interrupt(void *cpu, int mask);

/* The big lock guards these variables. */
static handle_interrupt *next;
static void *processors[PROCESSORS];

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

static void *poll_apics(void *unused)
{
    for (;;) {
        usleep(PAUSE_US);
        qemu_mutex_lock_iothread_impl(__FILE__, __LINE__);
        for (int i = 0; i < PROCESSORS && processors[i]; i++)
            next(processors[i], POLL);
        qemu_mutex_unlock_iothread();
    }
    return unused;
}

static void start(void)
{
    pthread_t thread;

    next = original();
    if (pthread_create(&thread, NULL, poll_apics, NULL))
        abort();
}

static void remember(void *cpu)
{
    for (int i = 0; i < PROCESSORS; i++) {
        if (!processors[i])
            processors[i] = cpu;
        if (processors[i] == cpu)
            return;
    }
}

void tcg_handle_interrupt(void *cpu, int mask)
{
    bool locked = qemu_mutex_iothread_locked();

    if (!locked)
        qemu_mutex_lock_iothread_impl(__FILE__, __LINE__);
    if (!next)
        start();
    remember(cpu);
    next(cpu, mask);
    if (!locked)
        qemu_mutex_unlock_iothread();
}
