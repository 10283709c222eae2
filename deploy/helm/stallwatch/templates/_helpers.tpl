{{- define "stallwatch.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "stallwatch.fullname" -}}
{{- if eq .Release.Name (include "stallwatch.name" .) -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "stallwatch.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "stallwatch.labels" -}}
app.kubernetes.io/name: {{ include "stallwatch.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "stallwatch.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Settings as the variables that stallwatch reads: {canary: {mode: persistent}} is STALLWATCH_CANARY__MODE. */}}
{{- define "stallwatch.env" -}}
{{- range $group, $settings := . }}
{{- range $name, $value := $settings }}
{{- if not (kindIs "invalid" $value) }}
- name: STALLWATCH_{{ upper $group }}__{{ upper $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "stallwatch.securityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /*
One container of stallwatch. Takes a dict: root (the context of this chart), settings, resources.
*/}}
{{- define "stallwatch.container" -}}
name: stallwatch
image: {{ include "stallwatch.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args: [run]
env:
  {{- include "stallwatch.env" .settings | nindent 2 }}
ports:
  - {name: stallwatch, containerPort: 9709}
resources:
  {{- toYaml .resources | nindent 2 }}
securityContext:
  {{- include "stallwatch.securityContext" . | nindent 2 }}
volumeMounts:
  - {name: stallwatch-incidents, mountPath: /var/lib/stallwatch}
  - {name: stallwatch-no-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
  {{- if .root.Values.apiKeySecret.name }}
  - {name: stallwatch-api-key, mountPath: /etc/stallwatch/key, readOnly: true}
  {{- end }}
  {{- if .root.Values.tlsSecret.name }}
  - {name: stallwatch-tls, mountPath: /etc/stallwatch/tls, readOnly: true}
  {{- end }}
livenessProbe:
  {{- include "stallwatch.probe" .root | nindent 2 }}
{{- end }}

{{- /* Asks only whether our own loop turns. The kubelet has no certificate to show, so the container asks itself. */}}
{{- define "stallwatch.probe" -}}
{{- $probe := deepCopy .Values.sidecar.livenessProbe -}}
{{- if and .Values.tlsSecret.name .Values.tlsSecret.clientCertificates -}}
{{- $command := dict "exec" (dict "command" (list "stallwatch" "healthcheck")) "periodSeconds" 60 -}}
{{- $probe = merge $command (omit $probe "httpGet") -}}
{{- else if and .Values.tlsSecret.name $probe.httpGet -}}
{{- $_ := set $probe.httpGet "scheme" "HTTPS" -}}
{{- end -}}
{{- toYaml $probe -}}
{{- end }}

{{- /* Settings that every container starts from: where incidents go, key, certificates; then those of the values. */}}
{{- define "stallwatch.settings" -}}
{{- $own := dict "recorder" (dict "directory" "/var/lib/stallwatch" "max_bytes" "128MiB") -}}
{{- if .Values.apiKeySecret.name -}}
{{- $_ := set $own "engine" (dict "api_key_file" (printf "/etc/stallwatch/key/%s" .Values.apiKeySecret.key)) -}}
{{- end -}}
{{- with .Values.tlsSecret -}}
{{- if .name -}}
{{- $web := dict "tls_cert_file" "/etc/stallwatch/tls/tls.crt" "tls_key_file" "/etc/stallwatch/tls/tls.key" -}}
{{- if .clientCertificates -}}
{{- $_ := set $web "client_ca_file" "/etc/stallwatch/tls/ca.crt" -}}
{{- end -}}
{{- $_ := set $own "web" $web -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite $own (deepCopy .Values.settings)) -}}
{{- end }}

{{- /*
For charts of vLLM that include this one as a dependency: an entry for `initContainers` (or for `containers`, with
sidecar.native false). Takes this chart's context:

    initContainers:
      {{- include "stallwatch.sidecar" .Subcharts.stallwatch | nindent 6 }}
*/}}
{{- define "stallwatch.sidecar" -}}
{{- $settings := include "stallwatch.settings" . | fromYaml -}}
{{- $settings = mergeOverwrite (dict "engine" (dict "url" .Values.sidecar.engineUrl)) $settings -}}
{{- $resources := .Values.resources -}}
{{- if .Values.sidecar.guaranteed -}}
{{- $equal := dict "cpu" "500m" "memory" "256Mi" -}}
{{- $resources = dict "requests" $equal "limits" $equal -}}
{{- end -}}
{{- $container := include "stallwatch.container" (dict "root" . "settings" $settings "resources" $resources) | fromYaml -}}
{{- if .Values.sidecar.native -}}
{{- $_ := set $container "restartPolicy" "Always" -}}
{{- end -}}
{{- if .Values.sidecar.gpu -}}
{{- $devices := list (dict "name" "NVIDIA_VISIBLE_DEVICES" "value" "all") (dict "name" "NVIDIA_DRIVER_CAPABILITIES" "value" "utility") -}}
{{- $_ := set $container "env" (concat $container.env $devices) -}}
{{- end -}}
{{- toYaml (list $container) -}}
{{- end }}

{{- /*
Room for incidents: twice what the recorder may write and 512 MiB at least, for above it the kubelet would evict the
pod, vLLM included. Takes the settings of the container; whatever is no size stops stallwatch itself.
*/}}
{{- define "stallwatch.room" -}}
{{- $size := .recorder.max_bytes | toString | lower | trimSuffix "b" -}}
{{- $unit := regexFind "[kmg]i?$" $size -}}
{{- $units := dict "k" 1e3 "ki" 1024.0 "m" 1e6 "mi" 1048576.0 "g" 1e9 "gi" 1073741824.0 -}}
{{- $bytes := mulf (float64 (trimSuffix $unit $size | trim)) (get $units $unit | default 1.0) -}}
{{- printf "%dMi" (int64 (max 512.0 (ceil (divf (mulf 2.0 $bytes) 1048576.0)))) -}}
{{- end }}

{{- /* Entries for the `volumes` of a pod with the sidecar. */}}
{{- define "stallwatch.volumes" -}}
{{- include "stallwatch.volumesFor" (dict "root" . "settings" (include "stallwatch.settings" . | fromYaml)) }}
{{- end }}

{{- /* The same for a container with these settings. Takes a dict: root, settings. */}}
{{- define "stallwatch.volumesFor" -}}
- name: stallwatch-incidents
  emptyDir: {sizeLimit: {{ include "stallwatch.room" .settings }}}
- name: stallwatch-no-token
  emptyDir: {sizeLimit: 1Mi}
{{- with .root.Values.apiKeySecret }}
{{- if .name }}
- name: stallwatch-api-key
  secret: {secretName: {{ .name }}, defaultMode: 0444}
{{- end }}
{{- end }}
{{- with .root.Values.tlsSecret }}
{{- if .name }}
- name: stallwatch-tls
  # Readable for our user whatever the pod's fsGroup is.
  secret: {secretName: {{ .name }}, defaultMode: 0444}
{{- end }}
{{- end }}
{{- end }}

{{- /* Entries for the labels of a pod with the sidecar: by these the monitor finds it. */}}
{{- define "stallwatch.podLabels" -}}
stallwatch/sidecar: "true"
{{- end }}

{{- /* Every watcher, those of stateful sets spelt out, as one list below the key `all`. */}}
{{- define "stallwatch.watchers" -}}
{{- $all := list -}}
{{- range .Values.watchers -}}
{{- $all = append $all . -}}
{{- end -}}
{{- range $set := .Values.statefulSets -}}
{{- $namespace := default $.Release.Namespace $set.namespace -}}
{{- range $ordinal := until (int $set.replicas) -}}
{{- $pod := printf "%s-%d" $set.name $ordinal -}}
{{- $host := printf "%s.%s.%s.svc" $pod $set.serviceName $namespace -}}
{{- $url := printf "%s://%s:%d" (default "http" $set.scheme) $host (int (default 8000 $set.port)) -}}
{{- $all = append $all (dict "name" $pod "url" $url "pod" $pod "namespace" $namespace "job" $set.name "settings" (default dict $set.settings)) -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "all" $all) -}}
{{- end }}
