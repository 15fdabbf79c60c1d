/* The processor's side: gates into ring 0, interrupt controllers, clock, start and end. */
#include "machine.h"

extern u8 exception_stubs[], interrupt_stubs[], gate_stub[];
extern u64 idt[PROCESSORS][VECTORS][2];
/* The first exception: vector, error code, RIP, RAX, CR2, RSP. */
extern u64 fault_record[6];

enum { EXCEPTIONS = 32, BREAKPOINT = 3, STUB_BYTES = 16 };
/* `build` links the image at IMAGE_START; its code comes first. */
enum { IMAGE_START = 1 << 20, IMAGE_CODE_END = IMAGE_START + 0x20000, IMAGE_END = 16 << 20 };
enum { GATE_WAIT, GATE_ALLOW, GATE_TRIPLE_FAULT };
enum { COM1_INTERRUPTS = 0x3f9, COM1_FIFO = 0x3fa, COM1_LINE = 0x3fb };
enum { PIC1_MASK = 0x21, PIC2_MASK = 0xa1 };
/* Intel ICH9: the LPC bridge's ACPI base and control; the offsets of PM1_CNT and PM_TMR. */
enum { LPC_PMBASE = 0x40, LPC_ACPI_CNTL = 0x44, PM1_CNT = 4, PM_TMR = 8 };
/* PM1_STS is the first register; writing a one clears its bit. */
enum { PM1_POWER_BUTTON = 0x100, PM1_SLEEP_ENABLE = 0x2000, PM_TMR_HZ = 3579545 };

/* Registers of the local APIC. */
#define APIC(at) (*(volatile u32 *)(0xfee00000ull + (at)))
enum {
    APIC_ID = 0x20,
    APIC_TPR = 0x80,
    APIC_EOI = 0xb0,
    APIC_SPURIOUS = 0xf0,
    APIC_ISR = 0x100,
    APIC_ICR = 0x300,
    APIC_ICR_HIGH = 0x310,
    APIC_LVT_TIMER = 0x320,
    APIC_TIMER_INITIAL = 0x380,
    APIC_TIMER_CURRENT = 0x390,
    APIC_TIMER_DIVIDE = 0x3e0,
};
enum { TIMER_PERIODIC = 0x20000, TIMER_BY_16 = 3, LEVEL_TRIGGERED = 0x8000 };
/* INIT and the startup IPI to all other processors. */
enum { ICR_PENDING = 0x1000, ICR_INIT = 0xc4500, ICR_STARTUP = 0xc4600 };

enum { MAX_RANGES = 8 };
static struct {
    u64 start, length;
} memory[MAX_RANGES];
static u32 memory_ranges;
static u16 pmbase;
static u64 cycles_per_millisecond, start_cycles;
static u32 timer_ticks, apic_ids[PROCESSORS];

static u64 cycles(void)
{
    u32 low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return (u64)high << 32 | low;
}

/* Calls entry.S for operations that ring 3 may not do. */
static void gate(u64 function)
{
    __asm__ volatile("int3" : "+a"(function)::"rcx", "rdx", "memory");
}

void wait_for_interrupt(void)
{
    gate(GATE_WAIT);
}

void allow_interrupts(void)
{
    gate(GATE_ALLOW);
}

u32 message_address(u32 processor)
{
    return 0xfee00000 | apic_ids[processor] << 12;
}

int is_in_service(u32 vector)
{
    return APIC(APIC_ISR + vector / 32 * 16) >> vector % 32 & 1;
}

void end_of_interrupt_intx(void)
{
    APIC(APIC_EOI) = 0;
}

static void ioapic_write(u32 at, u32 value)
{
    *(volatile u32 *)0xfec00000ull = at;
    *(volatile u32 *)0xfec00010ull = value;
}

void intx_route(u32 processor)
{
    for (u32 pin = 0; pin < INTX_PINS; pin++)
        ioapic_write(0x11 + 2 * (16 + pin), apic_ids[processor] << 24);
}

static void set_gate(u64 *gate, u64 stub, u64 privilege)
{
    u64 code_selector = 8, present_interrupt_gate = 0x8e00;
    gate[0] = (stub & 0xffff) | code_selector << 16 | privilege << 45 |
              present_interrupt_gate << 32 | stub >> 16 << 48;
    gate[1] = stub >> 32;
}

/* Each processor has its own stubs and thus its own counts. */
static void gates_start(u32 processor)
{
    u64 stubs = (u64)interrupt_stubs + STUB_BYTES * (VECTORS - EXCEPTIONS) * processor;
    for (u32 vector = 0; vector < EXCEPTIONS; vector++)
        set_gate(idt[processor][vector], (u64)exception_stubs + STUB_BYTES * vector, 0);
    for (u32 vector = EXCEPTIONS; vector < VECTORS; vector++)
        set_gate(idt[processor][vector], stubs + STUB_BYTES * (vector - EXCEPTIONS), 0);
    set_gate(idt[processor][BREAKPOINT], (u64)gate_stub, 3);
}

static void local_apic_start(void)
{
    apic_ids[this_processor()] = APIC(APIC_ID) >> 24;
    APIC(APIC_TPR) = 0;
    APIC(APIC_SPURIOUS) = 0x17f;
    APIC(APIC_TIMER_DIVIDE) = TIMER_BY_16;
    APIC(APIC_LVT_TIMER) = TIMER_PERIODIC | TIMER_VECTOR;
}

static void interrupts_start(void)
{
    for (u32 processor = 0; processor < PROCESSORS; processor++)
        gates_start(processor);
    out8(PIC1_MASK, 0xff);
    out8(PIC2_MASK, 0xff);
    local_apic_start();
    /* INTx of the slots uses pins 16 to 23 of the I/O APIC. */
    for (u32 pin = 0; pin < INTX_PINS; pin++) {
        ioapic_write(0x11 + 2 * (16 + pin), APIC(APIC_ID));
        ioapic_write(0x10 + 2 * (16 + pin), LEVEL_TRIGGERED | (INTX_VECTOR + pin));
    }
}

/* Without firmware, nothing has set the base of the power management registers. */
static void power_management_start(void)
{
    PciAddress lpc = {31, 0};
    pmbase = pci_read(lpc, LPC_PMBASE) & 0xff80;
    if (pmbase)
        return;
    pmbase = 0x600;
    pci_write(lpc, LPC_PMBASE, pmbase | 1);
    pci_write(lpc, LPC_ACPI_CNTL, (pci_read(lpc, LPC_ACPI_CNTL) & ~0xffu) | 0x80);
}

/* Measures the time stamp counter and the APIC's timer for 20 ms of the ACPI timer, which has a
 * known frequency and 24 bits. The APIC's timer then ticks 200 times a second, so that a wait for a
 * missing interrupt ends. */
static void clock_start(void)
{
    u32 from = in32(pmbase + PM_TMR), passed = 0;
    u64 first = cycles();
    APIC(APIC_TIMER_INITIAL) = 0xffffffff;
    while (passed < PM_TMR_HZ / 50)
        passed = (in32(pmbase + PM_TMR) - from) & 0xffffff;
    u64 cycles_passed = cycles() - first;
    u32 ticks = 0xffffffff - APIC(APIC_TIMER_CURRENT);
    cycles_per_millisecond = cycles_passed * PM_TMR_HZ / 1000 / passed;
    if (!cycles_per_millisecond)
        cycles_per_millisecond = 1;
    start_cycles = cycles();
    timer_ticks = (u64)ticks * PM_TMR_HZ / passed / 200 + 1;
    APIC(APIC_TIMER_INITIAL) = timer_ticks;
}

void processor_prepare(void)
{
    local_apic_start();
    APIC(APIC_TIMER_INITIAL) = timer_ticks;
}

static void send_ipi(u32 command)
{
    APIC(APIC_ICR) = command;
    while (APIC(APIC_ICR) & ICR_PENDING)
        ;
}

static void pause_for(u64 time)
{
    u64 end = microseconds() + time;
    while (microseconds() < end)
        ;
}

/* The delays and the second startup IPI are those of Intel's manual (volume 3, 8.4.4.1). */
void processors_awaken(u32 page)
{
    send_ipi(ICR_INIT);
    pause_for(10000);
    send_ipi(ICR_STARTUP | page >> 12);
    pause_for(200);
    send_ipi(ICR_STARTUP | page >> 12);
}

void processor_wake(u32 number)
{
    APIC(APIC_ICR_HIGH) = apic_ids[number] << 24;
    send_ipi(WAKE_VECTOR);
}

u64 microseconds(void)
{
    return (cycles() - start_cycles) * 1000 / cycles_per_millisecond;
}

void power_button_enable(void)
{
    out16(pmbase + 2, PM1_POWER_BUTTON);
}

int power_button(void)
{
    int pressed = in16(pmbase) & PM1_POWER_BUTTON;
    if (pressed)
        out16(pmbase, PM1_POWER_BUTTON);
    return pressed != 0;
}

int machine_memory(u32 number, u64 *start, u64 *length)
{
    if (number >= memory_ranges)
        return 0;
    *start = memory[number].start;
    *length = memory[number].length;
    return 1;
}

/* Copies the map of RAM, because the balloon's driver gives page 0 away, where QEMU has it. */
static void memory_start(u32 start_info)
{
    /* The offsets of the map's address and of its number of entries in PVH's structure. */
    struct {
        u64 start, length;
        u32 type, reserved;
    } *map = *(void **)(u64)(start_info + 40);
    enum { RAM = 1 };
    for (u32 i = 0; i < *(u32 *)(u64)(start_info + 48) && memory_ranges < MAX_RANGES; i++)
        if (map[i].type == RAM) {
            memory[memory_ranges].start = map[i].start;
            memory[memory_ranges++].length = map[i].length;
        }
}

void machine_start(u32 start_info)
{
    memory_start(start_info);
    /* 8N1, FIFO on, no interrupts. */
    out8(COM1_INTERRUPTS, 0);
    out8(COM1_LINE, 3);
    out8(COM1_FIFO, 7);
    interrupts_start();
    u64 command_line = *(u64 *)(u64)(start_info + 24);
    if (command_line)
        options_read((const char *)command_line);
    power_management_start();
    clock_start();
}

void machine_end(void)
{
    /* Sleep type 0 is S5 on this chip. The delay allows a machine to power off late. */
    out16(pmbase + PM1_CNT, PM1_SLEEP_ENABLE);
    for (int i = 0; i < 1000; i++)
        in8(0x80);
    for (;;)
        gate(GATE_TRIPLE_FAULT);
}

/* Called by entry.S after the first exception. Prints the return addresses on the stack. */
void windrv_fault(void)
{
    print("\nfail exception: vector %u error %llx at %llx cr2 %llx rax %llx\n# on the stack:",
          (u32)fault_record[0], fault_record[1], fault_record[2], fault_record[4], fault_record[3]);
    u64 at = fault_record[5];
    for (u64 i = 0; i < 64 && at >= IMAGE_START && at < IMAGE_END; i++, at += 8)
        if (*(u64 *)at > IMAGE_START && *(u64 *)at < IMAGE_CODE_END)
            print(" %llx", *(u64 *)at);
    print("\n");
    machine_end();
}
