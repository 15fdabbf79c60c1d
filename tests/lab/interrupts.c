/*
 * QEMU's TCG has four bugs in its emulation of AMD-V; version 11 has the last two still. This
 * library replaces tcg_handle_interrupt() (LD_PRELOAD) and fixes them. It works with QEMU 7.2 of
 * Debian 12, whose TCG is a module that calls the function by its name.
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
 *
 * Third: helper_vmrun() does not load the interrupt shadow that do_vmexit() has stored. If the
 * host's tick ends a nested guest between its STI and HLT, the guest's next interrupt is then
 * delivered before the HLT: the guest's processor sleeps although it has been woken, and a process
 * waits until another interrupt comes, if any. Therefore this library holds interrupts back while a
 * nested guest is in the shadow, which is one instruction.
 *
 * Fourth: helper_vmrun() leaves the vector of an interrupt that it injects in exception_index. If
 * the main loop asks the processor to leave its loop before something else changes that number, the
 * processor takes it for an exception and delivers the interrupt again, also while the nested guest
 * has interrupts off. The guest then waits forever for a lock that the interrupted code holds.
 * Therefore this library ignores exceptions with a number that only interrupts have.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* CPU_INTERRUPT_POLL of target/i386/cpu.h: poll the APIC. */
#define POLL 0x10
#define PAUSE_US 50000
#define PROCESSORS 64

/* HF_INHIBIT_IRQ_MASK and HF_GUEST_MASK of target/i386/cpu.h: in a shadow; in a nested guest. */
#define SHADOW (1u << 3 | 1u << 21)

/* The beginnings of VMStateField and VMStateDescription of include/migration/vmstate.h. */
struct field {
    const char *name, *hint;
    size_t offset;
};

struct description {
    const char *name;
    const void *more[3];
};

/* Words of CPUClass, TCGCPUOps and the fields of a processor's state that are searched. */
#define CLASS_WORDS 64
#define TABLE_WORDS 24
#define STATE_WORDS 2048

/* The first and the last vector that an exception does not have. */
#define FIRST_VECTOR 32
#define LAST_VECTOR 255

extern const struct description vmstate_x86_cpu, vmstate_cpu_common;
void *object_get_class(void *object);
bool x86_cpu_exec_interrupt(void *cpu, int request);
void x86_cpu_do_interrupt(void *cpu);

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

/* Offsets in a processor, and the processors' functions with ours among them. */
static size_t flags_at, exception_at, is_software_at;
static void *functions[TABLE_WORDS];

static int32_t number(void *cpu, size_t offset)
{
    return *(int32_t *)((char *)cpu + offset);
}

static bool exec_interrupt(void *cpu, int request)
{
    return (number(cpu, flags_at) & SHADOW) != SHADOW && x86_cpu_exec_interrupt(cpu, request);
}

static void do_interrupt(void *cpu)
{
    int exception = number(cpu, exception_at);

    if (exception < FIRST_VECTOR || exception > LAST_VECTOR || number(cpu, is_software_at))
        x86_cpu_do_interrupt(cpu);
}

/* The memory of the emulator's own program, which can be read. */
static uintptr_t program_start, program_end;

static int find_program(struct dl_phdr_info *object, size_t size, void *unused)
{
    (void)size;
    (void)unused;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        uintptr_t start = object->dlpi_addr + part->p_vaddr;

        if (part->p_type != PT_LOAD)
            continue;
        if (!program_start)
            program_start = start;
        program_end = start + part->p_memsz;
    }
    /* The program is the first object, and the only one of interest. */
    return 1;
}

static bool is_in_program(const void *memory)
{
    uintptr_t address = (uintptr_t)memory;

    return address >= program_start && address < program_end;
}

/* The state that QEMU saves of a processor names its parts and their offsets. */
static size_t offset_of(const struct description *state, const char *name)
{
    for (int i = 0; i < CLASS_WORDS; i++) {
        const void *const *fields = ((const void *const *const *)state)[i];

        if (!is_in_program(fields))
            continue;
        for (int j = 0; j < STATE_WORDS; j++) {
            const struct field *field = (const struct field *)(fields + j);

            if (!is_in_program(field + 1))
                break;
            if (is_in_program(field->name) && !strcmp(field->name, name))
                return field->offset;
        }
    }
    abort();
}

/* A part of a processor's state that QEMU saves only if it is needed. */
static const struct description *find_part(const struct description *state, const char *name)
{
    for (int i = 0; i < CLASS_WORDS; i++) {
        const struct description *const *parts = ((const void *const *)state)[i];

        for (; is_in_program(parts) && is_in_program(*parts); parts++)
            if (is_in_program((*parts)->name) && !strcmp((*parts)->name, name))
                return *parts;
    }
    abort();
}

static void find_offsets(void)
{
    const struct description *part = find_part(&vmstate_cpu_common, "cpu_common/exception_index");

    flags_at = offset_of(&vmstate_x86_cpu, "env.hflags");
    exception_at = offset_of(part, "exception_index");
    /* CPUX86State has exception_is_int, exception_next_eip and dr in this order. */
    is_software_at = offset_of(&vmstate_x86_cpu, "env.dr") - sizeof(uint64_t) - sizeof(int32_t);
}

/* Replaces a function in the table. */
static void replace(void *function, void *ours)
{
    for (int i = 0; i < TABLE_WORDS; i++) {
        if (functions[i] == function) {
            functions[i] = ours;
            return;
        }
    }
    abort();
}

/*
 * Replaces functions that a processor calls for its interrupts and exceptions. The class has
 * pointers to several tables, which may lie one behind the other: the right one has the function
 * nearest to its start.
 */
static void replace_functions(void *cpu)
{
    void **class = object_get_class(cpu), **found = NULL;
    int at = TABLE_WORDS;

    for (int i = 0; i < CLASS_WORDS; i++) {
        void **table = class[i];

        for (int j = 0; j < at && is_in_program(table + j); j++) {
            if (table[j] == (void *)x86_cpu_exec_interrupt) {
                at = j;
                found = &class[i];
            }
        }
    }
    if (!found)
        abort();
    memcpy(functions, *found, sizeof functions);
    replace(x86_cpu_exec_interrupt, exec_interrupt);
    replace(x86_cpu_do_interrupt, do_interrupt);
    *found = functions;
}

static void start(void *cpu)
{
    pthread_t thread;

    next = original();
    dl_iterate_phdr(find_program, NULL);
    find_offsets();
    replace_functions(cpu);
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
        start(cpu);
    remember(cpu);
    next(cpu, mask);
    if (!locked)
        qemu_mutex_unlock_iothread();
}
