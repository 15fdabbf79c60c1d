//! Variables of the screen, in browsers and by VNC.

use crate::settings::variable::{Variable, variables};

pub(super) const SCREEN: &[Variable] = variables! {
    /// Where the screen is seen: `web` (browsers, and VNC viewers where VNC_PORT is set), `vnc`,
    /// `disabled` (a display that nobody sees) or `none` (no display).
    translated "DISPLAY" = "web" (screen.display);
    /// The display that the guest sees.
    translated "VGA" = "virtio" (screen.adapter);
    /// The port for VNC viewers, which have no TLS. Without it, and unless DISPLAY is `vnc` or
    /// COMPAT is `dockur` (5900 then), the pod does not listen for them. Their password is made,
    /// and `transom password` prints it.
    done "VNC_PORT" = "" (screen.vnc_port);
    /// Browsers are served.
    done "WEB" = "Y" (screen.web);
    /// The port for browsers.
    done "WEB_PORT" = "8006" (screen.web_port);
    /// The screen asks for USERNAME and PASSWORD; where PASSWORD is not set, one is made. If
    /// PROTECT is not set it does, unless COMPAT is dockur, or VERSION is probe and PASSWORD is not
    /// set; N opens it to all who reach its port.
    done "PROTECT" = "" (screen.protect);
    /// The password of the screen, where it is not PASSWORD.
    done "PASS" = "" (screen.pass);
    /// Pictures may lose a little sharpness where that saves bandwidth.
    ignored "LOSSY" = "N"
        => "every viewer chooses for itself how sharp its picture is: set the quality there";
    /// Pictures are drawn by a graphics card of the host.
    ignored "GPU" = "N" => "no graphics card is lent to the guest: leave it out";
    /// Which graphics card.
    ignored "RENDERNODE" = "" => "no graphics card is lent to the guest: leave it out";
    /// What the container engine gives of NVIDIA's drivers.
    ignored "NVIDIA_DRIVER_CAPABILITIES" = ""
        => "no graphics card is lent to the guest: leave it out";
    /// Sound in the browser.
    ignored "AUDIO" = "N" => "the browser has no sound: listen through a remote desktop";
    /// Which sound card.
    ignored "SOUND" = "" => "the machine has no sound card: listen through a remote desktop";
    /// A socket inside of the container.
    ignored "WSS_SOCKET" = "" => "the viewer needs no socket of its own: leave it out";
    /// A port of old versions.
    ignored "WSS_PORT" = "" => "the viewer is at WEB_PORT, below /websockify: leave it out";
    /// A port of old versions.
    ignored "WSD_PORT" = "" => "the status is at WEB_PORT, below /status: leave it out";
    /// What browsers call the pod, with scheme and port: where a proxy hides that, or where PROTECT
    /// is N and its name could be anybody's.
    done "WEB_ORIGIN" = "" (screen.web_origin);
    /// Proxies that may say for whom they ask (`X-Forwarded-For` and the like).
    done "WEB_PROXY" = "" (screen.web_proxy);
};
