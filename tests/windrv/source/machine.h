/* The machine below the port driver: serial line, memory, command line, PCI, interrupts, time. */
#ifndef WINDRV_MACHINE_H
#define WINDRV_MACHINE_H
#include <ntddk.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

/* machine.c: start, interrupts, clock, end. */

/* Vectors of INTx (one for each pin), the timer and messages. Stubs in entry.S count them. */
enum { INTX_VECTOR = 0x30, TIMER_VECTOR = 0x40, MESSAGE_VECTOR = 0x48, LAST_VECTOR = 0x7e };
enum { INTX_PINS = 8, VECTORS = 128 };
/* WAKE_VECTOR ends the wait of another processor. */
enum { WAKE_VECTOR = 0x41 };
enum { PROCESSORS = 4 };
extern u32 interrupt_counts[PROCESSORS][VECTORS];

/* Prepares interrupts, command line and clock; `start_info` is the address of PVH's structure. */
void machine_start(u32 start_info);
/* A range of RAM by its number; 0 if there are fewer. */
int machine_memory(u32 number, u64 *start, u64 *length);
/* Switches the machine off. */
void machine_end(void);
/* Without it, QEMU ignores the power button. */
void power_button_enable(void);
/* Whether the power button was pressed since the last call. */
int power_button(void);
/* Microseconds since the clock was started. */
u64 microseconds(void);
/* Halts until an interrupt has been counted. */
void wait_for_interrupt(void);
/* Counts pending interrupts without waiting for one. */
void allow_interrupts(void);
/* Prepares the local APIC of a further processor. */
void processor_prepare(void);
/* Sends INIT and startup IPIs to all other processors, which begin in this page. */
void processors_awaken(u32 page);
/* Ends the other processor's wait. */
void processor_wake(u32 number);
/* The destination of a processor's messages: its local APIC. */
u32 message_address(u32 processor);
/* Whether the local APIC has this vector in service, as it must until `end_of_interrupt_intx`. */
int is_in_service(u32 vector);
void end_of_interrupt_intx(void);
/* Sends INTx to this processor. */
void intx_route(u32 processor);

/* processor.c: several processors. Without the word `processors=`, only the first one runs. */
extern u32 processors_running;
void processors_start(u32 count);
/* The processor that asks. Each has its stack; threads of KMDF's drivers run on the first one. */
u32 this_processor(void);
/* Runs the function on each of the first `count` processors, and returns when all have ended. */
typedef void Task(void);
void processors_run(u32 count, Task *);
/* The idle work of the others; the function returns whether there was any. */
typedef int Idle(void);
void processors_idle(Idle *);
/* Returns when the others are idle and wait; they go on after `processors_release`. */
void processors_hold(void);
void processors_release(void);
/* Waits for the lock; 0 if this processor has it already. */
int spin_lock(int *);
/* 0 if this processor does not have the lock. */
int spin_unlock(int *);
#define COUNT(counter) __atomic_fetch_add(&(counter), 1, __ATOMIC_RELAXED)

/* text.c: the serial line. Another processor's lines come neither within one nor between
 * `print_begin` and `print_end`. */
void print_begin(void);
void print_end(void);
void print(const char *format, ...);
void print_list(const char *format, va_list list);

/* memory.c: a heap that is released as a whole. */
void heap_above_4_gib(void);
void *allocate(u64 length, u64 alignment);
u64 allocated(void);
void release_to(u64 mark);
void seed_random(u64 seed);
u32 random_number(void);

/* option.c: words NAME=VALUE of the command line. */
void options_read(const char *command_line);
const char *option(const char *name);
u64 option_number(const char *name, u64 otherwise);

/* main.c: results. */

/* Whether the command line selects this value, or sets no `name` at all. */
int wanted(const char *name, const char *value);
/* The start of the names of the checks that follow. */
void set_prefix(const char *driver, const char *mode);
/* Prints and counts the result of a check. */
void check(int good, const char *name, const char *format, ...);

/* pci.c: configuration space by ports CF8h and CFCh. */
typedef struct {
    u8 device, function;
} PciAddress;
enum {
    PCI_ID = 0x00,
    PCI_COMMAND = 0x04,
    PCI_REVISION = 0x08,
    PCI_BAR0 = 0x10,
    PCI_SUBSYSTEM = 0x2c,
    PCI_CAPABILITIES = 0x34,
};
/* I/O space, memory space, bus master, interrupt disable. */
enum { COMMAND_IO = 1, COMMAND_MEMORY = 2, COMMAND_MASTER = 4, COMMAND_NO_INTX = 0x400 };
enum { COMMAND_ON = COMMAND_IO | COMMAND_MEMORY | COMMAND_MASTER };
u32 pci_read(PciAddress, u32 at);
void pci_write(PciAddress, u32 at, u32 value);
/* The address and length of a BAR; the length is 0 if there is none. Decoding must be off. */
u64 pci_bar(PciAddress, int number, u64 *length);
/* The offset of the first capability with this ID; 0 if there is none. */
u8 pci_capability(PciAddress, u8 id);
typedef struct {
    u64 address, length;
    int number, io;
} PciBar;
/* Lists the BARs and switches decoding on; returns their number. */
u32 pci_bars(PciAddress, PciBar bars[6]);
/* bars.c: moves the BARs of a stopped device to places that depend on `turn`; returns success. */
int bars_move(PciAddress, u32 turn);
/* Finds the first device with this vendor (the low half) and device; whether there is one. */
int pci_find(u32 id, PciAddress *where);
/* 0: no such virtio device; 1: subsystem or revision differ from the driver's INF; 2: they match.
 */
int virtio_find(u16 device, PciAddress *where);
/* Maps device memory at its physical address. */
void *map_device(u64 address, u64 length);
/* Maps RAM at its physical address. */
void *map_memory(u64 address, u64 length);

/* messages.c: sets up MSI-X as Windows' PCI driver does. */
enum { MAX_MESSAGES = 32 };
typedef struct {
    PciAddress pci;
    u8 capability; /* the offset of the MSI-X capability */
    volatile u32 *table;
    u32 table_size, messages, first_vector;
    u32 processors;      /* messages are spread over the first ones */
    u32 neighbours;      /* this many messages in a row have the same processor; 0 is 1 */
    u32 first_processor; /* the processor of message 0 */
    u32 seen[PROCESSORS][MAX_MESSAGES], fired[MAX_MESSAGES], unclaimed_messages;
    u8 target[MAX_MESSAGES];  /* the processor of each message */
    u8 allowed[MAX_MESSAGES]; /* bits of processors where it may arrive */
    u32 taken[PROCESSORS];    /* messages that each processor has taken */
    u32 misrouted;            /* messages that arrived at another processor */
    u32 intx_fired, intx_unclaimed;
    u32 intx_ended_early; /* the interrupt controller ended it before the driver's handler */
} Interrupts;
/* Whether the line was high although the handler had found nothing. Resets may withdraw INTx. If
 * the interrupt controller ends an interrupt before the handler, it arrives twice at most. */
static __inline int line_stays_high(const Interrupts *it)
{
    u32 claimed = it->intx_fired - it->intx_unclaimed, early = it->intx_ended_early;
    return it->intx_unclaimed > 10 + (early < claimed ? early : claimed);
}
/* Finds the MSI-X table of a function with these BARs. */
void messages_find(Interrupts *, PciAddress, const PciBar bars[], u32 count);
/* Enables up to `wanted` messages. With 0, INTx is on unless the device is polled. */
void messages_start(Interrupts *, u32 wanted, int polled);
void messages_stop(Interrupts *);
/* Whether this message has arrived once more at this processor; counts it. */
int message_arrived(Interrupts *, u32 message);
/* Moves a message to another processor. Until `messages_moved`, the old one may take it, too. */
void message_move(Interrupts *, u32 message, u32 processor);
void messages_moved(Interrupts *);
/* Masks a message, as Windows does while it moves the message to another processor. */
void message_mask(Interrupts *, u32 message, int masked);

/* Ports and the time stamp counter; ring 3 may use all of them. */
static __inline void out8(u16 port, u8 value)
{
    __asm__ volatile("outb %0, %1" ::"a"(value), "Nd"(port));
}
static __inline void out16(u16 port, u16 value)
{
    __asm__ volatile("outw %0, %1" ::"a"(value), "Nd"(port));
}
static __inline void out32(u16 port, u32 value)
{
    __asm__ volatile("outl %0, %1" ::"a"(value), "Nd"(port));
}
static __inline u8 in8(u16 port)
{
    u8 value;
    __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}
static __inline u16 in16(u16 port)
{
    u16 value;
    __asm__ volatile("inw %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}
static __inline u32 in32(u16 port)
{
    u32 value;
    __asm__ volatile("inl %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

#endif
