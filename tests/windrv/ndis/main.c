/* The list of the modes of a network adapter, and one run for each. */
#include "intel.h"
#include "traffic.h"

static const struct {
    const char *name;
    NicMode mode;
} MODES[] = {
    {"msix4", {MAX_MESSAGES, 4, 0}},
    {"msix1", {MAX_MESSAGES, 1, 0}},
    {"two", {2, 4, 0}},
    {"one", {1, 4, 0}},
    {"wire", {0, 4, 0}},
    {"smp2", {MAX_MESSAGES, 2, 1}},
    {"smp4", {MAX_MESSAGES, 4, 1}},
};

static void (*const CHECKS[])(void) = {
    check_identity, check_sizes,      check_pieces, check_loads,     check_floods,
    check_filters,  check_vlans,      check_pauses, check_resets,    check_sleeps,
    check_scaling,  check_statistics, check_link,   check_checksums, check_large_sends,
};

/* Windows' stack sets a filter before it uses an adapter. */
static void open_filter(void)
{
    ULONG filter = NDIS_PACKET_TYPE_DIRECTED | NDIS_PACKET_TYPE_BROADCAST;
    NDIS_STATUS status = nic_set(OID_GEN_CURRENT_PACKET_FILTER, &filter, sizeof filter);
    check(status == NDIS_STATUS_SUCCESS, "filter", "status=%x", status);
}

static void check_interrupts(void)
{
    Interrupts *it = &nic.interrupts;
    u32 fired = 0;
    for (u32 i = 0; i < it->messages; i++)
        fired += it->fired[i];
    int good =
        it->messages ? fired && !it->unclaimed_messages : it->intx_fired > it->intx_unclaimed;
    good &= !it->misrouted;
    u32 sticky = interrupts_sticky();
    check(good && sticky < STICKY_CALLS && !line_stays_high(it), "interrupts",
          "messages=%u unclaimed=%u misrouted=%u intx=%u unclaimed=%u sticky=%u ended_early=%u "
          "deferred=%u again=%u",
          fired, it->unclaimed_messages, it->misrouted, it->intx_fired, it->intx_unclaimed, sticky,
          it->intx_ended_early, deferred.total, deferred.again);
}

static void check_framework(void)
{
    u32 lengths = used_wrong_lengths(), indices = used_wrong_indices();
    check(!mistakes.levels && !mistakes.locks && !mistakes.requests && !mistakes.unsupported &&
              !lengths && !indices && !nic.told.removal && !nic.told.errors,
          "framework",
          "levels=%u locks=%u requests=%u unsupported=%u used_lengths=%u used_indices=%u "
          "removal=%u errors=%u",
          mistakes.levels, mistakes.locks, mistakes.requests, mistakes.unsupported, lengths,
          indices, nic.told.removal, nic.told.errors);
}

static void run(const char *name, NicMode mode)
{
    PciAddress where;
    u64 begin = microseconds();
    int found = virtio_find(0x1041, &where);
    set_prefix("netkvm", name);
    if (!found)
        return;
    if (mode.together && mode.processors > processors_running) {
        print("skip %s: %u processors are running\n", name, processors_running);
        return;
    }
    memset(&mistakes, 0, sizeof mistakes);
    used_wrong_lengths();
    used_wrong_indices();
    used_may_be_shorter(NETWORK_HEADER);
    u32 blocks = pool_blocks();
    const char *failed = nic_start(where, mode);
    check(!failed && found == 2, "start", "%s slot=%02x table=%u messages=%u queues=%u",
          failed ? failed : "started", where.device, nic.interrupts.table_size,
          nic.interrupts.messages, nic.told.scale.NumberOfReceiveQueues);
    if (failed)
        return;
    open_filter();
    /* What an earlier mode has left under way arrives first. */
    memset(&sent, 0, sizeof sent);
    traffic_settle();
    intel_start();
    for (u32 i = 0; i < sizeof CHECKS / sizeof *CHECKS; i++) {
        intel_begin(i);
        CHECKS[i]();
        intel_end();
    }
    intel_stop();
    check_interrupts();
    leave_traffic();
    failed = nic_stop();
    check(!failed && pool_blocks() == blocks && !services_in_use(), "stop",
          "%s blocks=%u left=%u objects=%u", failed ? failed : "stopped", blocks, pool_blocks(),
          services_in_use());
    check_framework();
    used_may_be_shorter(0);
    /* Time for a device that goes on. */
    NdisMSleep(50000);
    u32 damaged = pool_damaged();
    check(!damaged, "freed", "damaged=%u ms=%llu", damaged, (microseconds() - begin) / 1000);
}

void ndis_run(void)
{
    for (u32 i = 0; i < sizeof MODES / sizeof *MODES; i++)
        if (wanted("driver", "netkvm") && wanted("mode", MODES[i].name))
            run(MODES[i].name, MODES[i].mode);
}
