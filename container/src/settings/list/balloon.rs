//! Variables of the memory balloon, which returns guest memory to the host.

use crate::settings::variable::{Variable, variables};

pub(super) const BALLOON: &[Variable] = variables! {
    /// Makes the guest return memory while the host is short of it.
    full "BALLOONING" = "N" (balloon.on);
    /// Memory that the guest always keeps: a share of its memory in per cent, or a size.
    full "BALLOONING_MIN_MEM" = "33%" (balloon.minimum);
    /// Memory use of the host, in per cent, above which the balloon grows.
    full "BALLOONING_RAM_THRESHOLD" = "80.0" (balloon.threshold);
    /// Memory use of the host, in per cent, above which the balloon grows at full speed.
    full "BALLOONING_RAM_THRESHOLD_HARD" = "90.0" (balloon.threshold_hard);
    /// Memory pressure of the host (PSI: per cent of the time that tasks wait for memory) above
    /// which the balloon grows.
    full "BALLOONING_PSI_PRESSURE" = "10.0" (balloon.pressure);
    /// Memory pressure of the host, in per cent, above which the balloon grows at full speed.
    full "BALLOONING_PSI_PRESSURE_MAX" = "50.0" (balloon.pressure_max);
    /// The smallest change of the balloon. Smaller ones are not made.
    full "BALLOONING_HYSTERESIS" = "128M" (balloon.hysteresis);
    /// Proportional gain of the controller: how strongly it reacts to the current shortage.
    full "BALLOONING_KP" = "0.5" (balloon.proportional);
    /// Integral gain of the controller: how strongly it reacts to a shortage that lasts.
    full "BALLOONING_KI" = "0.05" (balloon.integral);
    /// Seconds between two measurements.
    full "BALLOONING_INTERVAL" = "5" (balloon.interval);
    /// Log messages of the balloon: N (none), Y or all, controller (its decisions), or qmp (its
    /// requests to the machine).
    full "BALLOONING_DEBUG" = "N" (balloon.debug);
    /// The PID file of the balloon's process.
    ignored "BALLOONING_PID" = "" => "the balloon has no process of its own: leave it out";
    /// The socket of the balloon's process.
    ignored "BALLOONING_SOCKET" = "" => "the balloon needs no socket: leave it out";
};
