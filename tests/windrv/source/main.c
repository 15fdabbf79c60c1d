/* The list of modes, the list of checks, and one run for each driver and mode. */
#include "disk.h"

ULONG viostor_entry(PVOID, PVOID);
ULONG vioscsi_entry(PVOID, PVOID);
/* kmdf/main.c: the drivers of other devices. */
void kmdf_run(void);
/* ndis/main.c: network adapters. */
void ndis_run(void);
/* display/main.cpp: the display. */
void display_run(void);

Disk disk;
Request *requests[MAX_REQUESTS];
static Adapter adapter;
static u32 passed, failed;
static char prefix[48];

static const struct Driver {
    const char *name;
    DriverEntry *entry;
    u16 device;
    int scsi;
} DRIVERS[] = {
    {"viostor", viostor_entry, 0x1042, 0},
    {"vioscsi", vioscsi_entry, 0x1048, 1},
};

/* Messages, processors, polled, withheld, together: see Mode, and the table in README.md. */
static const struct NamedMode {
    const char *name;
    Mode mode;
} MODES[] = {
    {"msix4", {MAX_MESSAGES, 4, 0, 0, 0}},
    {"late4", {MAX_MESSAGES, 4, 0, STOR_PERF_OPTIMIZE_FOR_COMPLETION_DURING_STARTIO, 0}},
    {"msix1", {MAX_MESSAGES, 1, 0, 0, 0}},
    {"few", {3, 4, 0, 0, 0}},
    {"one", {1, 4, 0, 0, 0}},
    {"wire", {0, 4, 0, 0, 0}},
    {"dump", {0, 1, 1, 0, 0}},
    {"smp2", {MAX_MESSAGES, 2, 0, STOR_PERF_OPTIMIZE_FOR_COMPLETION_DURING_STARTIO, 1}},
    {"smp4", {MAX_MESSAGES, 4, 0, 0, 1}},
    {"smp_late4", {MAX_MESSAGES, 4, 0, STOR_PERF_OPTIMIZE_FOR_COMPLETION_DURING_STARTIO, 1}},
};

void check(int good, const char *name, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    if (good)
        passed++;
    else
        failed++;
    print_begin();
    print("%s %s.%s ", good ? "pass" : "fail", prefix, name);
    print_list(format, list);
    print("\n");
    print_end();
    va_end(list);
}

void set_prefix(const char *driver, const char *mode)
{
    u32 length = 0;
    for (; *driver; driver++)
        prefix[length++] = *driver;
    prefix[length++] = '.';
    for (; *mode; mode++)
        prefix[length++] = *mode;
    prefix[length] = 0;
}

/* The driver that runs, and how. */
static struct {
    const struct Driver *driver;
    PciAddress where;
    int found; /* see `virtio_find` */
    Mode mode;
} current;

int driver_start(void)
{
    used_forget();
    const char *step =
        adapter_start(&adapter, current.where, current.driver->entry, current.mode);
    PORT_CONFIGURATION_INFORMATION *config = &adapter.config;
    check(!step && current.found == 2, "start",
          "%s slot=%02x table=%u messages=%u breaks=%u longest=%u targets=%u luns=%u caches=%u",
          step ? step : "started", current.where.device, adapter.interrupts.table_size,
          adapter.interrupts.messages, config->NumberOfPhysicalBreaks,
          config->MaximumTransferLength, config->MaximumNumberOfTargets,
          config->MaximumNumberOfLogicalUnits, config->CachesData);
    return !step;
}

/* Allocates memory for the checks, and reads the driver's limits. */
static void prepare(const struct Driver *driver)
{
    static int written[2];
    PORT_CONFIGURATION_INFORMATION *config = &adapter.config;
    memset(&disk, 0, sizeof disk);
    disk.adapter = &adapter;
    disk.scsi = driver->scsi;
    disk.seconds = option_number("timeout", 60);
    disk.block = 512;
    disk.longest = config->MaximumTransferLength;
    if (disk.longest > 4 << 20)
        disk.longest = 4 << 20;
    disk.max_pieces = config->NumberOfPhysicalBreaks;
    if (disk.max_pieces > MAX_ELEMENTS)
        disk.max_pieces = MAX_ELEMENTS;
    disk.generation = allocate(REGION / 512 * sizeof *disk.generation, 16);
    disk.zeroed = allocate(REGION / 512, 16);
    /* An earlier mode of the same boot has written to this disk. */
    if (written[driver->scsi]++)
        memset(disk.generation, 0xff, REGION / 512 * sizeof *disk.generation);
    scratch = allocate(SCRATCH, PAGE);
    pages_start();
    for (u32 i = 0; i < MAX_REQUESTS; i++)
        requests[i] = request_new(&adapter);
}

/* Whether the ISR byte keeps its bits although it was read: how many of 10 interrupts that did not
 * come are claimed. The first call of each pair takes what has just come. */
static u32 sticky_interrupts(void)
{
    u32 claimed = 0;
    for (u32 i = 0; i < 10 && !adapter.mode.messages && !adapter.mode.polled; i++) {
        adapter.hw.HwInterrupt(adapter.extension);
        claimed += adapter.hw.HwInterrupt(adapter.extension) != 0;
    }
    return claimed;
}

/* Interrupts arrived as the mode requires. */
static void check_interrupts(void)
{
    Interrupts *it = &adapter.interrupts;
    u32 fired = 0;
    print("# %s: messages received:", prefix);
    for (u32 i = 0; i < it->messages; i++) {
        fired += it->fired[i] != 0;
        print(" %u", it->fired[i]);
    }
    print("; INTx %u\n", it->intx_fired);
    /* Two queues of vioscsi, for control and events, carry no reads and writes. */
    u32 other_messages = disk.scsi ? 3 : 1;
    int spread = it->messages > other_messages && adapter.mode.processors > 1;
    int expected = it->intx_fired > 0;
    if (adapter.mode.polled)
        expected = 1;
    else if (adapter.mode.messages)
        expected = fired >= (spread && adapter.performance.flags ? 2u : 1u);
    u32 sticky = sticky_interrupts();
    check(expected && !sticky && !line_stays_high(it), "interrupts",
          "messages=%u channels=%u range=%u-%u intx=%u unclaimed=%u sticky=%u ended_early=%u",
          fired, adapter.performance.channels, adapter.performance.first_message,
          adapter.performance.last_message, it->intx_fired, it->intx_unclaimed, sticky,
          it->intx_ended_early);
}

/* The driver used the port driver correctly. */
static void check_port(void)
{
    Calls *it = &adapter.calls;
    u32 indices = used_wrong_indices();
    int good = !indices && !it->lock_errors && !it->completed_unknown && !it->completed_twice;
    good = good && !it->errors_logged && !it->unsupported;
    check(good, "port",
          "locks=%u unknown=%u twice=%u logged=%u unsupported=%u busy=%u pauses=%u resumes=%u "
          "timeouts=%u depth=%u changes=%u/%u attentions=%u used_indices=%u",
          it->lock_errors, it->completed_unknown, it->completed_twice, it->errors_logged,
          it->unsupported, it->busy_calls, it->pauses, it->resumes, it->pauses_over,
          adapter.queue_depth, it->bus_changes, it->state_changes, disk.attentions, indices);
}

/* A check runs if all of its flags hold for the run. */
enum { ALWAYS = 0, READ_ONLY = 1, WRITABLE = 2, POLLED = 4, INTERRUPTS = 8, TOGETHER = 16 };
static const struct {
    void (*run)(void);
    u32 where;
} CHECKS[] = {
    {inquiry, ALWAYS},
    {capacity, ALWAYS},
    {class_commands, ALWAYS},
    {optional_commands, ALWAYS},
    {absent_addresses, ALWAYS},
    {mode_pages, ALWAYS},
    {write_cache, ALWAYS},
    {original, ALWAYS},
    {read_only, READ_ONLY},
    {sizes, WRITABLE},
    {longest, WRITABLE},
    {force_unit_access, WRITABLE},
    {synchronize, WRITABLE},
    {other_cdbs, WRITABLE},
    {mixed_polled, WRITABLE | POLLED},
    {mixed4, WRITABLE | INTERRUPTS},
    {mixed128, WRITABLE | INTERRUPTS},
    {flood, WRITABLE | INTERRUPTS},
    {together, WRITABLE | TOGETHER},
    {grow, WRITABLE | INTERRUPTS},
    {unmap, WRITABLE | INTERRUPTS},
    {resets, WRITABLE | INTERRUPTS},
    {mixed32, WRITABLE | INTERRUPTS},
    {restart, WRITABLE | INTERRUPTS},
    {check_interrupts, ALWAYS},
    {check_port, WRITABLE | INTERRUPTS},
    {removals, WRITABLE | INTERRUPTS},
    {everything, ALWAYS},
    {final, WRITABLE},
    {check_port, ALWAYS},
};

static void run_checks(void)
{
    for (u32 i = 0; i < sizeof CHECKS / sizeof *CHECKS; i++) {
        /* The early check of mode pages finds out whether the disk is read-only. */
        u32 here = disk.read_only ? READ_ONLY : WRITABLE;
        here |= adapter.mode.polled ? POLLED : INTERRUPTS;
        here |= adapter.mode.together ? TOGETHER : 0;
        if ((CHECKS[i].where & here) == CHECKS[i].where)
            CHECKS[i].run();
    }
}

/* The checks of a machine that is saved again and again (`saves=`). */
static void (*const SAVED_CHECKS[])(void) = {
    inquiry, capacity, mode_pages, original, saved, check_interrupts, everything, final, check_port,
};

static void run_saved_checks(void)
{
    for (u32 i = 0; i < sizeof SAVED_CHECKS / sizeof *SAVED_CHECKS; i++)
        SAVED_CHECKS[i]();
}

static void run(const struct Driver *driver, const struct NamedMode *mode)
{
    u64 mark = allocated(), begin = microseconds();
    current.driver = driver;
    current.mode = mode->mode;
    current.found = virtio_find(driver->device, &current.where);
    set_prefix(driver->name, mode->name);
    if (!current.found) {
        print("skip %s: there is no such device\n", prefix);
        return;
    }
    if (mode->mode.together && mode->mode.processors > processors_running) {
        print("skip %s: %u processors are running\n", prefix, processors_running);
        return;
    }
    if (driver_start()) {
        prepare(driver);
        if (option("saves"))
            run_saved_checks();
        else
            run_checks();
        check(adapter_control(ScsiStopAdapter), "stop", "ms=%llu", (microseconds() - begin) / 1000);
    }
    adapter_stop(&adapter);
    release_to(mark);
}

int wanted(const char *name, const char *value)
{
    const char *only = option(name);
    return !only || !memcmp(only, value, strlen(value));
}

/* Called by entry.S. */
void windrv(u32 start_info)
{
    machine_start(start_info);
    if (wanted("heap", "high") && option("heap"))
        heap_above_4_gib();
    data_seed = option_number("seed", 1);
    seed_random(data_seed);
    print("windrv: seed=%llu\n", data_seed);
    processors_start(option_number("processors", 1));
    for (u32 driver = 0; driver < sizeof DRIVERS / sizeof *DRIVERS; driver++)
        for (u32 mode = 0; mode < sizeof MODES / sizeof *MODES; mode++)
            if (wanted("driver", DRIVERS[driver].name) && wanted("mode", MODES[mode].name))
                run(&DRIVERS[driver], &MODES[mode]);
    kmdf_run();
    ndis_run();
    display_run();
    print("windrv: %u passed, %u failed\n", passed, failed);
    machine_end();
}
