/* The list of KMDF drivers, their modes, and one run for each. */
#include "kmdf.h"

NTSTATUS viorng_entry(PDRIVER_OBJECT, PUNICODE_STRING);
NTSTATUS balloon_entry(PDRIVER_OBJECT, PUNICODE_STRING);
NTSTATUS vioserial_entry(PDRIVER_OBJECT, PUNICODE_STRING);

/* The drivers' INF files limit the messages; that of the balloon asks for none. */
static const struct Driver {
    const char *name;
    DriverStart *start;
    u16 device;
    u32 messages;
    void (*checks)(void), (*removed)(void), (*prepare)(void);
} DRIVERS[] = {
    {"viorng", viorng_entry, 0x1044, 1, kmdf_check_rng, NULL, NULL},
    {"balloon", balloon_entry, 0x1045, 0, kmdf_check_balloon, kmdf_removed_balloon, NULL},
    {"vioserial", vioserial_entry, 0x1043, 2, kmdf_check_serial, NULL, kmdf_prepare_serial},
};

static const struct Mode {
    const char *name;
    u32 messages, processors;
} MODES[] = {
    {"msix", MAX_MESSAGES, 1}, {"wire", 0, 1},      {"smp2", MAX_MESSAGES, 2},
    {"smp4", MAX_MESSAGES, 4}, {"smp_wire4", 0, 4},
};

static void check_interrupts(void)
{
    Interrupts *it = &running->interrupts;
    u32 fired = 0;
    for (u32 i = 0; i < it->messages; i++)
        fired += it->fired[i];
    int good = it->messages ? fired && !it->unclaimed_messages : it->intx_fired != 0;
    /* Each processor with a message, or with INTx, ran the DPCs, and the first one none of its own.
     */
    u32 last = it->messages ? it->messages : 1, idle = 0;
    for (u32 i = 1; i <= last && it->processors > 1; i++)
        idle += !dpcs_run[i % it->processors];
    good &= !it->misrouted && !idle;
    /* Reading the ISR byte clears it. */
    u32 sticky = 0;
    for (u32 i = 0; i < 10 && !it->messages; i++)
        sticky += handler_claims_nothing();
    device_poll();
    check(good && sticky < 10 && !line_stays_high(it), "interrupts",
          "messages=%u unclaimed=%u misrouted=%u intx=%u unclaimed=%u sticky=%u ended_early=%u "
          "withdrawn=%u dpcs=%u/%u/%u/%u",
          fired, it->unclaimed_messages, it->misrouted, it->intx_fired, it->intx_unclaimed, sticky,
          it->intx_ended_early, intx_withdrawn, dpcs_run[0], dpcs_run[1], dpcs_run[2], dpcs_run[3]);
}

static void check_mistakes(void)
{
    u32 lengths = used_wrong_lengths(), indices = used_wrong_indices();
    u32 collisions = used_collisions();
    check(!collisions && !mistakes.levels && !mistakes.locks && !mistakes.requests && !lengths &&
              !indices,
          "framework",
          "levels=%u locks=%u requests=%u used_lengths=%u used_indices=%u collisions=%u",
          mistakes.levels, mistakes.locks, mistakes.requests, lengths, indices, collisions);
}

static void run(const struct Driver *driver, const struct Mode *mode)
{
    PciAddress where;
    u64 begin = microseconds();
    int found = virtio_find(driver->device, &where);
    set_prefix(driver->name, mode->name);
    if (!found)
        return;
    if (mode->processors > processors_running) {
        print("skip %s %s: %u processors are running\n", driver->name, mode->name,
              processors_running);
        return;
    }
    u32 messages = mode->messages < driver->messages ? mode->messages : driver->messages;
    if (mode->messages && !messages)
        return;
    memset(&mistakes, 0, sizeof mistakes);
    used_wrong_lengths();
    used_wrong_indices();
    used_collisions();
    intx_withdrawn = 0;
    memset(dpcs_run, 0, sizeof dpcs_run);
    u32 blocks = pool_blocks();
    used_watch(NULL);
    used_may_be_shorter(0);
    /* Orderly removal, then one of a device that vanishes; the checks run with both. */
    for (int surprise = 0; surprise <= 1; surprise++) {
        if (driver->prepare)
            driver->prepare();
        const char *failed = device_start(where, driver->start, messages, mode->processors);
        check(!failed && found == 2, "start", "%s slot=%02x table=%u messages=%u",
              failed ? failed : "started", where.device,
              running ? running->interrupts.table_size : 0,
              running ? running->interrupts.messages : 0);
        if (failed)
            return;
        driver->checks();
        check_interrupts();
        failed = device_remove(surprise);
        kmdf_requests_free();
        check(!failed && pool_blocks() == blocks, surprise ? "remove.surprise" : "remove",
              "%s blocks=%u left=%u", failed ? failed : "removed", blocks, pool_blocks());
        if (driver->removed)
            driver->removed();
    }
    check_mistakes();
    u32 damaged = pool_damaged();
    check(!damaged, "freed", "damaged=%u ms=%llu", damaged, (microseconds() - begin) / 1000);
}

void kmdf_run(void)
{
    pages_find();
    for (u32 driver = 0; driver < sizeof DRIVERS / sizeof *DRIVERS; driver++)
        for (u32 mode = 0; mode < sizeof MODES / sizeof *MODES; mode++)
            if (wanted("driver", DRIVERS[driver].name) && wanted("mode", MODES[mode].name))
                run(&DRIVERS[driver], &MODES[mode]);
}
